# The one entry point for people and for CI. Needs Go, git and make.

GO      ?= go
TOOL    := $(GO) tool -modfile=tools/go.mod
TESTRUN := $(GO) run ./internal/testkit/cmd/testrun
# Programs without which a green run would prove nothing.
REQUIRE := PostgreSQL,versitygw,git
PKG     ?= ./...
FUZZTIME ?= 10s

export CGO_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help build demo test race lint quicklint fmt cases bench bench-load sim spec mutants chaos histories fuzz pages ci deps long

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the one static binary, ./forgeci
	$(GO) build -trimpath -buildvcs=auto -o forgeci ./cmd/forgeci

demo: build ## start a server and a runner, run a workflow of two jobs, stop
	@./scripts/demo.sh

test: deps ## run every test; PKG=./internal/x/... narrows it
	@$(TESTRUN) -require "$(if $(filter ./...,$(PKG)),$(REQUIRE))" -- -timeout 15m $(PKG)

race: deps ## run every test under the race detector (needs a C compiler)
	@CGO_ENABLED=1 $(TESTRUN) -- -race -timeout 30m $(PKG)

lint: ## check formatting, vet and the linters of .golangci.yml
	$(TOOL) golangci-lint run ./...

quicklint: ## the part of lint that is ready in a minute: vet, staticcheck, gofumpt
	$(GO) vet ./...
	$(TOOL) staticcheck ./...
	@unformatted=$$($(TOOL) gofumpt -l .) && if [ -n "$$unformatted" ]; then echo "not formatted (make fmt):"; echo "$$unformatted"; exit 1; fi

fmt: ## format the code
	$(TOOL) gofumpt -w .

cases: deps ## print each case of the case list with its tests and their results
	@$(TESTRUN) -cases internal/testkit/cases.txt -areas "$(AREAS)" -- -timeout 15m ./...

bench: ## run the Go benchmarks; BENCH=Claim narrows them
	$(GO) test -run '^$$' -bench '$(or $(BENCH),.)' -benchmem $(PKG)

bench-load: ## measure the product under load, one JSON line each; ONLY=drain narrows it
	@./scripts/test-deps.sh tar zstd
	@$(GO) run ./internal/testkit/cmd/benchload $(if $(ONLY),-only $(ONLY))

sim: ## simulate SEEDS seeds (500) from SEED (1; next: the committed counter); the last line is one JSON object
	@summary=$$(mktemp) && trap 'rm -f "$$summary"' EXIT; \
	$(GO) test -count=1 -timeout 2h -run '^TestSeeds$$' ./internal/sim -args -seeds $(or $(SEEDS),500) $(if $(filter next,$(SEED)),-next,-seed $(or $(SEED),1)) -summary "$$summary" $(if $(HISTORY),-history -test.v); \
	status=$$?; cat "$$summary"; exit $$status

mutants: deps ## plant each committed defect and see it noticed; QUICK=1 a few, ONLY=name,name these; the last line is one JSON object
	@$(GO) run ./internal/testkit/cmd/mutants $(if $(QUICK),-quick) $(if $(ONLY),-only $(ONLY))

chaos: ## break real processes on purpose; CHAOS='-all -points 4' sizes it; the last line is one JSON object
	@summary=$$(mktemp -d) && trap 'rm -rf "$$summary"' EXIT; \
	$(GO) test -count=1 -timeout 2h -run '^TestChaos_$(ONLY)' ./internal/e2e -args -summary "$$summary" $(or $(CHAOS),-all -points 0 -rounds 2 -cuts 100); \
	status=$$?; cat "$$summary"/summary.json; exit $$status

histories: deps ## record and check HISTORIES (500) histories of concurrent callers; the last line is one JSON object
	@summary=$$(mktemp) && trap 'rm -f "$$summary"' EXIT; \
	$(GO) test -count=1 -timeout 4h -run '^TestHistories$$' ./internal/sim/histories -args -histories $(or $(HISTORIES),500) -seed $(or $(SEED),1) -summary "$$summary"; \
	status=$$?; cat "$$summary"; exit $$status

spec: ## check the models of the protocol; the last line is one JSON object
	@./scripts/test-deps.sh spin gcc
	@$(GO) run ./internal/testkit/cmd/spec $(if $(ONLY),-only $(ONLY))

fuzz: ## fuzz each target for FUZZTIME (10s); the last line is one JSON object; ONLY=Token narrows it
	@$(GO) run ./internal/testkit/cmd/fuzz -time $(FUZZTIME) $(if $(ONLY),-only $(ONLY)) $(PKG)

long: ## the long tier, an hour at most: everything that CI has no time for
	@$(MAKE) --no-print-directory sim SEEDS=2000 SEED=next
	@$(MAKE) --no-print-directory histories HISTORIES=500
	@$(MAKE) --no-print-directory spec
	@$(MAKE) --no-print-directory mutants
	@$(MAKE) --no-print-directory chaos
	@$(MAKE) --no-print-directory fuzz FUZZTIME=10s

pages: ## show every page with sample data at http://127.0.0.1:8301/
	@$(GO) run ./internal/testkit/cmd/pages

ci: ## what CI runs
	@./.ci/run

deps:
	@./scripts/test-deps.sh
