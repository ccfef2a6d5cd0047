"""Who plays in the demo: two services, their routes, and the events that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from eventbus.event import Event
from eventbus.policy import RetryPolicy
from eventbus.service import Service

SOURCE: Final = "wms-pedidos"
RETRY: Final = RetryPolicy(max_retries=3, delay=0.6)


def services(address: str) -> list[Service]:
    """The warehouse and the tax office, both of prefix `wms`: each gets its own copy of every event."""
    warehouse = Service("wms-cincout", retry=RETRY, grace=3.0)
    warehouse.forward("order.*", to=f"{address}/orders")
    warehouse.forward("stock.*", to=f"{address}/stock")
    warehouse.forward("delivery.*", to=f"{address}/delivery")
    warehouse.forward("label.*", to=f"{address}/labels")
    warehouse.forward("price.*", to=f"{address}/prices", status={404: "park"})
    fiscal = Service("wms-fiscal", retry=RETRY, grace=3.0)
    fiscal.forward("invoice.*", to=f"{address}/invoices", breaker=False)
    return [warehouse, fiscal]


def events() -> Sequence[Event]:
    """One morning at the warehouse."""
    pedido = {"pedido": 1042, "cliente": "Padaria Aurora", "itens": 3}
    return [
        _event("order.created", pedido, "1042"),
        _event("stock.reserved", {"pedido": 1042, "posicao": "A-17"}, "1042"),
        _event("invoice.issued", {"pedido": 1042, "valor": "318.90"}, "1042"),
        _event("delivery.scheduled", {"pedido": 1042, "janela": "08:00-10:00"}, "1042"),
        _event("label.printed", {"pedido": 1042, "volumes": 2}, "1042"),
        _event("price.changed", {"produto": "7891000100103", "preco": "4.59"}, "7891000100103"),
        _event("order.created", pedido | {"pedido": 1043, "cliente": "Mercado São João"}, "1043"),
        _event("invoice.issued", {"pedido": 1043, "valor": "77.10"}, "1043"),
    ]


def _event(type: str, data: dict[str, object], key: str) -> Event:
    return Event(type, data, source=SOURCE, key=key, tenant="cincout")
