"""HTTP forwarding: an event becomes a POST, the answer's status becomes its outcome.

- `endpoint`: the whole of it, one `Endpoint` per URL
- `cloudevents_http`: the request; `answer`: what the answer means; both pure
- `signing`, `auth`: who we are; `breaker`: when to leave an endpoint alone
- `port`: the one method a client must have; `lean_sender` (default), `aiohttp_sender` and `httpx_sender` have it;
  `senders`: what our own are told

No HTTP client is imported until an endpoint is opened.
"""

from eventbus.forward.auth import Auth
from eventbus.forward.breaker import Breaker
from eventbus.forward.endpoint import BREAKER_OPEN, ENDPOINT_DOWN, Endpoint
from eventbus.forward.port import Answer, Sender, SendFailed
from eventbus.forward.senders import default_sender
from eventbus.forward.signing import Signer

__all__ = [
    "BREAKER_OPEN",
    "ENDPOINT_DOWN",
    "Answer",
    "Auth",
    "Breaker",
    "Endpoint",
    "SendFailed",
    "Sender",
    "Signer",
    "default_sender",
]
