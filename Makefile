# What a person types. `make demo` and `make test` do all their own set-up from a fresh clone.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2

.PHONY: help demo test test-rabbit4 lint unit brokers brokers-install brokers-stop faults faults-kafka test-redis8 bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## the whole story on a temporary SQLite bus, in a few seconds
	$(BIN)/eventbus demo

test: lint unit  ## everything: style, types, all tests

lint: $(READY)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY) brokers-install  ## all tests, most of which wait, so JOBS=2 at once; PYTEST="-k name" to choose
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

test-rabbit4: $(READY)  ## what concerns RabbitMQ on RabbitMQ 4, from Debian trixie in a folder of its own
	home=$$(sh scripts/rabbitmq4.sh) && EVENTBUS_RABBIT_HOME=$$home EVENTBUS_RABBIT_PORT=$(or $(PORT),5653) \
		$(BIN)/python -m pytest tests/contract/test_rabbit.py tests/adapter tests/e2e/test_cli_topology.py \
		tests/faults/test_rabbit_faults.py -k "rabbit or Rabbit or topology" $(PYTEST)

brokers-install: $(READY)  ## install the brokers the tests need, from Debian's packages and Maven, where they are missing
	@sh scripts/redis.sh install
	@$(BIN)/python -m tests.brokers.rabbit install
	@$(BIN)/python -m tests.brokers.promtool
	@$(BIN)/python -m tests.brokers.kafka install

brokers: $(READY) brokers-install  ## start them on loopback to play with, and print their URLs (tests start their own)
	@sh scripts/redis.sh start
	@$(BIN)/python -m tests.brokers.rabbit start
	@$(BIN)/python -m tests.brokers.kafka start

brokers-stop:  ## stop what `make brokers` started
	@sh scripts/redis.sh stop
	@$(BIN)/python -m tests.brokers.rabbit stop
	@$(BIN)/python -m tests.brokers.kafka stop

faults: $(READY) brokers-install  ## the long kill tests (make test has a short version): SECONDS=120 to choose
	EVENTBUS_FAULT_SECONDS=$(or $(SECONDS),120) $(BIN)/python -m pytest tests/faults -v
	EVENTBUS_REDRIVE_LETTERS=5000 $(BIN)/python -m pytest tests/contract/test_dead_letter_operations.py -k killed -v -s

faults-kafka: $(READY) brokers-install  ## the same on three Kafka nodes, of which one after the other is killed
	EVENTBUS_FAULT_KAFKA=3 $(BIN)/python -m pytest tests/faults/test_kafka_faults.py -v -k "coordinator or node"

test-redis8: $(READY)  ## the Redis tests on Redis 8 and on Valkey 8, from Debian trixie's packages
	@set -e; for server in $$(sh scripts/redis8.sh); do \
		$$server --version; \
		EVENTBUS_TEST_REDIS_SERVER=$$server $(BIN)/python -m pytest tests/contract/test_redis.py tests/adapter/test_redis_*.py $(PYTEST); \
	done

bench: $(READY)  ## the figures, as ratios to peers in the same run
	$(BIN)/python -m benchmarks

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml eventbus_kafka/pyproject.toml eventbus_rabbit/pyproject.toml eventbus_redis/pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq python3-venv; } || { \
		echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[cli,console,http,speed]' --group dev
	$(BIN)/python -m pip install --quiet --editable ./eventbus_kafka --editable ./eventbus_rabbit --editable ./eventbus_redis
	@touch $@
