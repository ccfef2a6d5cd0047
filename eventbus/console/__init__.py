"""The admin API, health and metrics over HTTP: `eventbus serve`, and the port of `eventbus run --health`.

- `tokens`: who may do what; `limits`: how often; `guard`: what every request must pass and every answer carries
- `routing`: an endpoint is a function, and its signature is what is read, checked and documented
- `letters`, `watching`: the endpoints; `openapi`: the document made from them; `problems`: the one shape of errors
- `health`, `metrics`: readiness by progress, and Prometheus' text; `app`, `server`: all of it together, on a socket

starlette and uvicorn come with the extra and are imported nowhere else.
"""
