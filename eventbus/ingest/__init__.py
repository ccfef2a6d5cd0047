"""Publishing over HTTP, for services that are not Python: `POST /events`, answered once the broker has confirmed.

- `address`: where to listen, and the token (pure)
- `requests`: CloudEvents out of a request, in binary, structured and batch mode (pure)
- `answers`: status and body out of what became of the events (pure)
- `intake`: many small requests become one publish
- `protocol`: HTTP/1.1 on an asyncio transport, parsed by httptools; bounded in every direction; `exchange`: one request
- `listener`: takes connections on a socket, and stops in good order

Not imported by `import eventbus`; `eventbus run --listen` and `[listen]` in bus.toml are its face.
"""
