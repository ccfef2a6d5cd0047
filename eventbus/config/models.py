"""The shape of bus.toml as pydantic models: every key there is, its type, and which go together."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from eventbus import naming
from eventbus.config.problems import Path
from eventbus.durations import seconds
from eventbus.errors import ConfigError
from eventbus.forward.auth import Auth
from eventbus.forward.breaker import Breaker
from eventbus.forward.endpoint import check_url
from eventbus.forward.signing import Signer
from eventbus.listening import Address, check_token
from eventbus.policy import RetryPolicy
from eventbus.registry import open_store
from eventbus.service import MAX_IN_PLACE
from eventbus.shaping import Fairness, Idempotency, Rate
from eventbus.status import StatusMap

BROKER_TABLES: Final = ("rabbit", "kafka", "redis", "sqlite", "memory")


def wrong(text: str, *path: str | int) -> PydanticCustomError:
    """A validation error; `path` leads from the model that raises it to the key that is wrong."""
    where: Path = path
    return PydanticCustomError("eventbus", "{text}", {"text": text, "path": where})


def _whole(least: int) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1_000_000:
            raise wrong(f"must be a whole number from {least}")
        return value

    return check


def _number(least: float, below: float, text: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not least <= number < below:
            raise wrong(text)
        return number

    return check


def _duration(value: object) -> float:
    try:
        return seconds(value)  # type: ignore[arg-type]
    except (ConfigError, AttributeError):
        raise wrong("not a duration; write '5s', '250ms', '1h30m' or a number of seconds") from None


def _longer_than_zero(value: float) -> float:
    if value <= 0:
        raise wrong("must be longer than zero")
    return value


def _told_by(check: Callable[[str], object]) -> Callable[[str], str]:
    """A validator out of a check of the core; its message without the name and value, which are told already."""

    def validate(value: str) -> str:
        try:
            check(value)
        except ConfigError as error:
            raise wrong(told(str(error), value)) from None
        return value

    return validate


def told(text: str, value: object = None) -> str:
    """A message of the core without its beginning "name = value:" or "name 'value':"."""
    head, colon, rest = text.partition(": ")
    for quoted in (repr(value), str(value)):
        if isinstance(value, str) and value and head.endswith(quoted) and colon:
            return rest
    return rest if colon and " = " in head else text


def _check_verdict(value: str) -> object:
    return StatusMap({500: value})


def _check_status(value: str) -> object:
    return StatusMap({value: "drop"})


def _check_target(value: str) -> str:
    module, colon, name = value.partition(":")
    if not (module and colon and name) or not all(part.isidentifier() for part in (module + "." + name).split(".")):
        raise wrong("write module:name, such as 'app:reserve'")
    return value


def _code(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _version(value: object) -> object:
    if str(value) != "1" or isinstance(value, bool):
        raise wrong("must be 1; this eventbus knows no other version of the file")
    return 1


Count = Annotated[int, BeforeValidator(_whole(1))]
CountFromZero = Annotated[int, BeforeValidator(_whole(0))]
Duration = Annotated[float, BeforeValidator(_duration)]
Period = Annotated[float, BeforeValidator(_duration), AfterValidator(_longer_than_zero)]
Code = Annotated[str, BeforeValidator(_code)]
Pattern = Annotated[str, AfterValidator(_told_by(naming.check_pattern))]
Prefix = Annotated[str, AfterValidator(_told_by(naming.check_prefix))]
ServiceName = Annotated[str, AfterValidator(_told_by(naming.check_service))]
Endpoint = Annotated[str, AfterValidator(_told_by(check_url))]
Target = Annotated[str, AfterValidator(_check_target)]
StatusKey = Annotated[str, AfterValidator(_told_by(_check_status))]
Verdict = Annotated[str, AfterValidator(_told_by(_check_verdict))]
Statuses = dict[StatusKey, Verdict]


class Table(BaseModel):
    """A table of bus.toml: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RetryTable(Table):
    """`retry = { max_retries = 10, delay = "5s" }` or `{ base = "1s", factor = 2, cap = "60s", ... }`."""

    max_retries: CountFromZero | None = None
    max_attempts: Count | None = None
    mode: Literal["delayed", "in-place"] = "delayed"
    delay: Duration | None = None
    base: Duration | None = None
    factor: Annotated[float, BeforeValidator(_number(1, 100.0001, "must be a number from 1 to 100"))] | None = None
    cap: Duration | None = None
    jitter: Annotated[float, BeforeValidator(_number(0, 1, "must be a number from 0 to below 1"))] | None = None

    @model_validator(mode="after")
    def _fits(self) -> RetryTable:
        if self.max_retries is not None and self.max_attempts is not None:
            raise wrong("give max_retries or max_attempts, not both (max_attempts = max_retries + 1)")
        if self.delay is not None and self._growing:
            raise wrong(f"give delay (always the same) or {', '.join(self._growing)} (growing), not both")
        try:
            policy = self.policy()
        except ConfigError as error:
            raise wrong(str(error).removeprefix("retry.")) from None
        if policy.mode == "in-place" and policy.total() > MAX_IN_PLACE:
            raise wrong(
                f"in-place retries may wait {policy.total():.0f} s in all; at most {MAX_IN_PLACE:.0f} s are allowed, "
                f"because the message is held all that time"
            )
        return self

    @property
    def _growing(self) -> dict[str, float]:
        values = {"base": self.base, "factor": self.factor, "cap": self.cap, "jitter": self.jitter}
        return {name: value for name, value in values.items() if value is not None}

    def policy(self) -> RetryPolicy:
        """The policy it stands for."""
        if self._growing:
            return RetryPolicy.exponential(
                **self._growing, max_retries=self.max_retries, max_attempts=self.max_attempts, mode=self.mode
            )
        return RetryPolicy(
            max_retries=self.max_retries,
            max_attempts=self.max_attempts,
            delay=5.0 if self.delay is None else self.delay,
            mode=self.mode,
        )


class BatchTable(Table):
    """`batch = { size = 1000, timeout = "1s", concurrency = 2, on_error = "split" }`, beside a handler; or beside
    `forward` with `mode = "batch"`, where the size is 100 unless set.
    """

    size: Count | None = None
    timeout: Period = 1.0
    concurrency: Count = 2
    on_error: Literal["split", "fail-all"] = "split"


class SignTable(Table):
    """`sign = { secret = "whsec_..." }`, `{ secrets = [new, old] }` while one takes the other's place, or
    `{ secret_file = "/run/secrets/webhook" }` with one secret per line.
    """

    secret: SecretStr | None = None
    secrets: list[SecretStr] | None = None
    secret_file: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> SignTable:
        if sum(value is not None for value in (self.secret, self.secrets, self.secret_file)) != 1:
            raise wrong("give secret = '...', or secrets = ['new', 'old'] for rotation, or secret_file = '...'")
        try:
            Signer(*self.values("unread"))
        except ConfigError as error:
            raise wrong(str(error).removeprefix("sign: ").removeprefix("sign.")) from None
        return self

    def values(self, text: str) -> list[str]:
        """The secrets, in the clear; `text` is what stands in the file, if there is one."""
        if self.secret_file is not None:
            return text.split()
        secrets = self.secrets if self.secret is None else [self.secret]
        return [secret.get_secret_value() for secret in secrets or ()]


class BreakerTable(Table):
    """`breaker = { failures = 10, open = "5s", max = "60s" }`."""

    failures: Count = 10
    open: Period = 5.0
    max: Period = 60.0

    @model_validator(mode="after")
    def _fits(self) -> BreakerTable:
        if self.open > self.max:
            raise wrong("must not be above max", "open")
        return self

    def breaker(self) -> Breaker:
        """A new breaker with these numbers."""
        return Breaker(failures=self.failures, open=self.open, max=self.max)


class TlsTable(Table):
    """`tls = { ca = "ca.pem", cert = "client.pem", key = "client.key" }`: files, or the PEM text itself."""

    ca: str | None = None
    cert: str | None = None
    key: SecretStr | None = None
    password: SecretStr | None = None

    @model_validator(mode="after")
    def _fits(self) -> TlsTable:
        if self.key is not None and self.cert is None:
            raise wrong("key needs cert beside it")
        if self.ca is None and self.cert is None:
            raise wrong("give ca, or cert and key, or all of them")
        return self


class BasicTable(Table):
    """`basic = { user = "...", password = "..." }`, or `password_file` in the place of `password`."""

    user: str
    password: SecretStr | None = None
    password_file: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> BasicTable:
        if (self.password is None) == (self.password_file is None):
            raise wrong("give exactly one of password or password_file")
        return self


class AuthTable(Table):
    """`auth = { bearer = "..." }`, `{ bearer_file = "/run/secrets/token" }` or `{ basic = {...} }`."""

    bearer: SecretStr | None = None
    bearer_file: str | None = None
    basic: BasicTable | None = None

    @model_validator(mode="after")
    def _fits(self) -> AuthTable:
        if sum(value is not None for value in (self.bearer, self.bearer_file, self.basic)) != 1:
            raise wrong("give exactly one of bearer, bearer_file or basic = { user, password }")
        try:
            self.auth("unread")
        except ConfigError as error:
            raise wrong(str(error).partition(": ")[2]) from None
        return self

    @property
    def file(self) -> str | None:
        """The file that holds the secret, if one does."""
        return self.bearer_file if self.basic is None else self.basic.password_file

    def auth(self, text: str) -> Auth:
        """The credentials; `text` is what stands in the file, if there is one."""
        if self.basic is not None:
            password = self.basic.password
            return Auth.basic(self.basic.user, text.strip() if password is None else password.get_secret_value())
        return Auth.bearer(text if self.bearer is None else self.bearer.get_secret_value())


def _check_store(value: str) -> object:
    return open_store(value)


StoreUrl = Annotated[str, AfterValidator(_told_by(_check_store))]
Weight = Annotated[float, BeforeValidator(_number(0.001, 1000.001, "must be a number above 0, at most 1000"))]


class FairnessTable(Table):
    """`fairness = true`, or `{ in_a_row = 3, weights = { acme = 2 } }`."""

    in_a_row: Count = 3
    base: Count = 5
    step: Count = 1
    highest: Count = 1
    weights: dict[str, Weight] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> FairnessTable:
        if self.highest > self.base:
            raise wrong(f"must not be above base = {self.base}", "highest")
        return self

    def fairness(self) -> Fairness:
        """The rule it stands for."""
        return Fairness(self.in_a_row, self.base, self.step, self.highest, self.weights)


class RateTable(Table):
    """`rate = { limit = 100, period = "60s", by = "tenant", tenants = { acme = 500 }, scope = "service" }`."""

    limit: Count
    period: Period = 1.0
    by: Literal["all", "tenant"] = "all"
    tenants: dict[str, Count] = Field(default_factory=dict)
    scope: Literal["worker", "service"] = "worker"
    store: StoreUrl | None = None

    @model_validator(mode="after")
    def _fits(self) -> RateTable:
        try:
            self.rate()
        except ConfigError as error:
            key, _, text = str(error).removeprefix("rate.").partition(":")
            raise wrong(text.strip(), key.partition(" ")[0]) from None
        return self

    def rate(self) -> Rate:
        """The rate it stands for."""
        return Rate(self.limit, self.period, by=self.by, tenants=self.tenants, scope=self.scope, store=self.store)


class IdempotencyTable(Table):
    """`idempotency = { store = "redis://host", window = "24h", claim = "1m" }`."""

    store: StoreUrl | None = None
    window: Period = 86_400.0
    claim: Period | None = None

    def idempotency(self) -> Idempotency:
        """The setting it stands for."""
        return Idempotency(self.store, window=self.window, claim=self.claim)


Rates = Annotated[list[RateTable], BeforeValidator(lambda value: value if isinstance(value, list) else [value])]


ListenAddress = Annotated[str, AfterValidator(_told_by(Address.parse))]


class ListenTable(Table):
    """`[listen]`: publishing over HTTP; a token where others than this machine can reach the address."""

    address: ListenAddress | None = None
    token: SecretStr | None = None
    token_file: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> ListenTable:
        if self.token is not None and self.token_file is not None:
            raise wrong("give token or token_file, not both")
        if self.token is not None:
            try:
                check_token(self.token.get_secret_value())
            except ConfigError as error:
                raise wrong(str(error), "token") from None
        return self


class MappingTable(Table):
    """`[mapping]`: where to find attributes in the body of a message that has no CloudEvents attributes."""

    id: str | None = None
    type: str | None = None
    key: str | None = None
    tenant: str | None = None
    default_type: str | None = None


_FORWARD_ONLY: Final = ("sign", "breaker", "auth", "mode", "tls", "egress", "sender")


class RouteTable(Table):
    """`[[services.NAME.routes]]`: events of one pattern, and the endpoint or handler they go to."""

    on: Pattern
    forward: Endpoint | None = None
    handler: Target | None = None
    batch: BatchTable | None = None
    timeout: Period | None = None
    concurrency: Count | None = None
    retry: RetryTable | None = None
    status: Statuses | None = None
    sign: SignTable | None = None
    breaker: BreakerTable | Literal[False] = BreakerTable()
    auth: AuthTable | None = None
    tls: TlsTable | None = None
    egress: Literal["any", "public-only"] = "any"
    sender: Literal["lean", "aiohttp"] = "lean"
    mode: Literal["binary", "structured", "raw", "batch"] = "binary"
    permanent: list[str] | None = None
    rate: Rates = Field(default_factory=list)

    @field_validator("breaker", mode="plain")
    @classmethod
    def _read_breaker(cls, value: object) -> BreakerTable | Literal[False]:
        if isinstance(value, (BreakerTable, dict)):
            return BreakerTable.model_validate(value)
        try:
            return _BOOL.validate_python(value) and BreakerTable()
        except ValidationError:
            raise wrong("must be false, or a table such as { failures = 10, open = '5s', max = '60s' }") from None

    @model_validator(mode="after")
    def _fits(self) -> RouteTable:
        if (self.forward is None) == (self.handler is None):
            raise wrong("give exactly one of forward = 'https://...' or handler = 'module:name'")
        if self.forward is None:
            for name in _FORWARD_ONLY:
                if name in self.model_fields_set:
                    raise wrong("goes with forward only; this route has a handler", name)
        else:
            if self.permanent is not None:
                raise wrong("goes with handler only; this route has forward", "permanent")
            if self.batch is not None and self.mode != "batch":
                raise wrong("goes with handler, or with mode = 'batch' beside forward", "batch")
            if self.tls is not None and not self.forward.startswith("https:"):
                raise wrong("goes with an https URL only", "tls")
            try:
                check_url(self.forward, self.egress)
            except ConfigError as error:
                raise wrong(told(str(error), self.forward), "forward") from None
        if self.batch is not None and self.concurrency is not None:
            raise wrong("with batch, write concurrency inside it: batch = { concurrency = ... }", "concurrency")
        return self


_BOOL: Final = TypeAdapter(bool)


class ServiceTable(Table):
    """`[services.NAME]`: everything Service() takes, and its routes."""

    prefix: Prefix | None = None
    concurrency: Count = 64
    timeout: Period = 30.0
    retry: RetryTable | None = None
    status: Statuses | None = None
    permanent: list[str] = Field(default_factory=list)
    permanent_codes: list[Code] = Field(default_factory=list)
    retryable_codes: list[Code] = Field(default_factory=list)
    unknown_code: Literal["retry", "park"] = "retry"
    strict: bool = False
    dlq: bool = True
    on_exhausted: Literal["park", "retry-forever", "discard"] | None = None
    prefetch: Count | None = None
    max_local_delay: Duration = 30.0
    max_crashes: Count = 3
    grace: Duration = 25.0
    mapping: MappingTable = MappingTable()
    fairness: FairnessTable | Literal[False] = False
    rate: Rates = Field(default_factory=list)
    idempotency: IdempotencyTable | None = None
    ordering: Literal["key"] | None = None
    routes: list[RouteTable] = Field(default_factory=list)

    @field_validator("fairness", mode="plain")
    @classmethod
    def _read_fairness(cls, value: object) -> FairnessTable | Literal[False]:
        if isinstance(value, (FairnessTable, dict)):
            return FairnessTable.model_validate(value)
        try:
            return _BOOL.validate_python(value) and FairnessTable()
        except ValidationError:
            raise wrong("must be true, false, or a table such as { in_a_row = 3, weights = { acme = 2 } }") from None

    @model_validator(mode="after")
    def _fits(self) -> ServiceTable:
        if not self.dlq and self.on_exhausted not in ("retry-forever", "discard"):
            raise wrong("needs on_exhausted = 'retry-forever' or 'discard', chosen by hand", "dlq")
        first: dict[str, int] = {}
        for number, route in enumerate(self.routes):
            if route.on in first:
                raise wrong(
                    f"routes[{first[route.on]}] has this pattern already; exactly one route takes an event",
                    "routes",
                    number,
                    "on",
                )
            first[route.on] = number
        return self


class TokenTable(Table):
    """`[[admin.tokens]]`: who may use the admin API. `eventbus token` makes one and prints this table."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[\w.@-]+$")]
    role: Literal["viewer", "operator", "admin"]
    hash: str
    tenants: list[str] | None = None
    expires: datetime | None = None

    @field_validator("hash")
    @classmethod
    def _is_hash(cls, value: str) -> str:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
            raise wrong("must be the hash that `eventbus token` prints: sha256: and 64 hexadecimal digits")
        return value

    @field_validator("tenants")
    @classmethod
    def _for_somebody(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(value):
            raise wrong("must name tenants")
        if value == []:
            raise wrong("must name a tenant; leave it out for all tenants")
        return value

    @field_validator("expires")
    @classmethod
    def _in_utc(cls, value: datetime | None) -> datetime | None:
        return value if value is None or value.tzinfo else value.replace(tzinfo=timezone.utc)


class AdminTable(Table):
    """`[admin]`: the admin API of `eventbus serve`."""

    listen: ListenAddress = "127.0.0.1:8000"
    rate: Annotated[float, BeforeValidator(_number(0.1, 1_000_001, "must be a number from 0.1 to 1000000"))] = 50.0
    max_body_kib: Count = 32 * 1024
    tenant_metrics: Annotated[int, BeforeValidator(_number(0, 1001, "must be a whole number from 0 to 1000"))] = 0
    tokens: list[TokenTable] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits(self) -> AdminTable:
        first: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            if first.setdefault(token.name, number) != number:
                raise wrong(f"tokens[{first[token.name]}] has this name already", "tokens", number, "name")
        return self


class FileTable(Table):
    """The whole file."""

    version: Annotated[int, BeforeValidator(_version)] = 1
    url: str
    source: str = ""
    prefix: Prefix | None = None
    provision: Literal["create", "verify", "off"] = "create"
    mapping: MappingTable = MappingTable()
    listen: ListenTable = ListenTable()
    services: dict[ServiceName, ServiceTable] = Field(default_factory=dict)
    admin: AdminTable = AdminTable()
    rabbit: dict[str, object] = Field(default_factory=dict)
    kafka: dict[str, object] = Field(default_factory=dict)
    redis: dict[str, object] = Field(default_factory=dict)
    sqlite: dict[str, object] = Field(default_factory=dict)
    memory: dict[str, object] = Field(default_factory=dict)
