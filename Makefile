# Every target first makes .venv from requirements.lock, when it is missing or older than the lock.

PYTHON := .venv/bin/python
INSTALLED := .venv/.installed
PEERS := build/peers
# Older versions in which exported models have to run.
TRANSFORMERS := build/transformers-4.48.3 build/transformers-4.57.6
# One thread for each test process: they run side by side.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal

.PHONY: help setup demo test test-all test-portable mutants fingerprint lint format notebooks docs site bench-attention bench-data bench-embedding bench-intervals bench-onnx bench-linearized bench-mechanisms bench-relatives bench-training bench-overhead compare-mechanisms study-linearize results study-recipe study-twins study-families

help: ## Say what each target does (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## Make .venv from requirements.lock and install protlm into it
	@echo "protlm is in .venv; type: source .venv/bin/activate, then protlm --help"

demo: demo/data demo/run/loss.png demo/metrics_run.json demo/metrics_shipped.json demo/embeddings.h5 demo/attention.h5 demo/contacts.h5 ## Run the whole workflow on the shipped sample: prepare, train, evaluate, embed, look inside
	@echo; ls -l demo
	@echo; echo "Next: the table under Documentation in README.md has a page for each job."

# A step whose output exists is not repeated, so an interrupted demo resumes.
SAMPLE := data_prep/sample
# With rows as long as those of training: whole proteins take longer.
EVALUATE := .venv/bin/protlm evaluate evaluation.masked.max_length=512 data.dir=demo/data

demo/data: | $(INSTALLED)
	@echo "== Prepare 12,373 UniProt sequences: FASTA to verified HDF5 shards"
	.venv/bin/protlm prepare $(SAMPLE)/uniprot_sample.fasta.gz --out $@ --split-table $(SAMPLE)/uniprot_sample.splits.tsv.gz

demo/run/loss.png: | demo/data
	@echo "== Train a small model with Performer-ReLU heads and a window in one head of four"
	@echo "Training masks 30 % of the residues, so its validation perplexity is higher than that of the"
	@echo "evaluations below, which mask 15 %."
	.venv/bin/protlm train experiment=demo data.dir=demo/data run_dir=demo/run

demo/metrics_run.json: | demo/run/loss.png
	@echo "== Evaluate it in and out of distribution, against residue frequencies"
	$(EVALUATE) output=$@ checkpoint=demo/run 'split=[test_iid,test_remote_homolog,test_ood_cluster,test_ood_family]'

demo/metrics_shipped.json: | demo/data
	@echo "== Evaluate the shipped model on two of these splits, and on contacts"
	$(EVALUATE) output=$@ 'evaluation=[masked,contacts]' 'split=[test_iid,test_remote_homolog]'

demo/embeddings.h5: | $(INSTALLED)
	@echo "== Embed the 180 proteins of a FASTA file"
	.venv/bin/protlm embed $(SAMPLE)/uniprot_tiny.fasta.gz -o $@

demo/attention.h5: | $(INSTALLED)
	@echo "== Write the attention maps of BPT1_BOVIN"
	.venv/bin/protlm attention $(SAMPLE)/bpt1_bovin.fasta -o $@ --figure demo/attention.png

# P10081, yeast eIF4A: 119 residues with homologs in the training split.
demo/contacts.h5: | $(INSTALLED)
	@echo "== Predict the contacts of a protein of known structure"
	@echo "The precision of so small a model is a few percent on average. In the figure, crosses are"
	@echo "predictions that are wrong, and dots those that are right."
	.venv/bin/protlm contacts $(SAMPLE)/structures/test/1fuk_A.pdb.gz -o $@ --figure demo/contacts.png

test: $(INSTALLED) ## Run the tests, less those marked slow
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED) $(TRANSFORMERS:%=%/.installed) ## Run every test
	$(PYTEST) --durations=40 --durations-min=5

mutants: $(INSTALLED) ## Plant the stored faults one by one, and see which tests notice (hours; goes on)
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target build/mutants/lib coverage pytest-cov
	$(PYTHON) tests/mutants.py

fingerprint: $(INSTALLED) ## Print a hash of each main result on the sample, for changes that keep them
	@$(PYTHON) tests/fingerprint.py

test-portable: $(INSTALLED) ## Run the numeric tests as other processors and numbers of threads would
	$(PYTHON) tests/portable.py $(SETTINGS)

lint: $(INSTALLED) ## Check style, types, the layers of imports, and spelling
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright
	.venv/bin/lint-imports --no-cache
	.venv/bin/codespell

format: $(INSTALLED) ## Rewrite the code in the house format
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

docs: $(INSTALLED) ## Write the tables of docs/mechanisms.md and docs/settings.md
	$(PYTHON) -m docs.tables

site: $(INSTALLED) ## Build the site of the documentation in build/site
	$(PYTHON) -m sphinx -W --keep-going --quiet -c docs . build/site

notebooks: $(INSTALLED) ## Execute the notebooks on the shipped model (MODEL=RUN: on another)
	$(PYTHON) -m pytest --nbmake notebooks

bench-attention: $(PEERS)/.installed ## Measure attention on this machine beside its peers (OPTIONS=--quick)
	PYTHONPATH=$(PEERS) $(PYTHON) -m benchmarks.attention $(OPTIONS)

bench-data: $(INSTALLED) ## Measure preparing, reading and feeding (OPTIONS="--fasta FILE.fasta.gz")
	$(PYTHON) -m benchmarks.data $(OPTIONS)

bench-intervals: $(INSTALLED) ## Measure how often intervals of AUPRC and Fmax contain the true value (OPTIONS="--draws 100")
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.intervals $(OPTIONS)

bench-onnx: $(INSTALLED) ## Measure exported ONNX files beside torch (OPTIONS=--quick)
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.onnx_files $(OPTIONS)

bench-embedding: $(INSTALLED) ## Measure embedding beside EsmModel of transformers (OPTIONS=--quick)
	$(PYTHON) -m benchmarks.embedding $(OPTIONS)

bench-linearized: $(INSTALLED) ## Measure an ESM-2 8M beside the linear models that it is converted to (OPTIONS=--quick)
	OMP_NUM_THREADS=1 $(PYTHON) -m benchmarks.linearized $(OPTIONS)

bench-mechanisms: $(INSTALLED) ## Measure what every mechanism costs against the length (OPTIONS=--quick)
	$(PYTHON) -m benchmarks.mechanisms $(OPTIONS)

bench-relatives: $(INSTALLED) ## Measure queries with many relatives, and training on long families (OPTIONS=--quick)
	OMP_NUM_THREADS=2 $(PYTHON) -m benchmarks.relatives $(OPTIONS)

bench-training: $(PEERS)/.installed ## Measure training on this machine beside its peers (OPTIONS=--quick)
	PYTHONPATH=$(PEERS) $(PYTHON) -m benchmarks.training $(OPTIONS)

bench-overhead: $(INSTALLED) ## Measure what trainer, loader and logs add to a bare loop
	$(PYTHON) -m benchmarks.overhead $(OPTIONS)

compare-mechanisms: $(INSTALLED) ## Train a small model with every mechanism (OPTIONS=--quick)
	$(PYTHON) -m studies.training_comparison $(OPTIONS)

study-linearize: $(INSTALLED) ## Make a softmax model linear (MODEL=RUN DATA=DIR CLUSTERS=TSV, a prepared data set and its clusters)
	OMP_NUM_THREADS=1 $(PYTHON) -m studies.linearize $(MODEL) $(DATA) $(CLUSTERS) $(OPTIONS)

study-recipe: $(INSTALLED) ## Measure which options of the training recipe pay (DATA=DIR VALID=DIR, prepared data sets)
	$(PYTHON) -m studies.recipe $(DATA) $(VALID) $(OPTIONS)

results: $(INSTALLED) ## Compute the figures of a model card (OPTIONS="MODEL --sample DATA ...")
	$(PYTHON) -m studies.results $(OPTIONS)

study-twins: $(INSTALLED) ## Train Performer and softmax models as twins (TRAIN=DIR TEST=DIR SAMPLE=DIR, prepared data sets; GROUPS=TABLE of TEST)
	$(PYTHON) -m studies.twins $(TRAIN) $(TEST) --groups $(GROUPS) --sample $(SAMPLE) $(OPTIONS)

study-families: $(INSTALLED) ## Adapt a model to families and test its contacts (TRAIN=DIR STRUCTURES=DIR)
	OMP_NUM_THREADS=1 $(PYTHON) -m studies.families $(TRAIN) $(STRUCTURES) $(OPTIONS)

# Peers and older versions of transformers have folders of their own, and --no-deps leaves torch as
# it is.
define INSTALL_INTO_FOLDER
@rm -rf $(@D)
@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
@touch $@
endef

$(PEERS)/.installed: benchmarks/requirements.txt $(INSTALLED)
	$(INSTALL_INTO_FOLDER)

build/transformers-%/.installed: tests/interop/transformers-%.txt $(INSTALLED)
	$(INSTALL_INTO_FOLDER)

# The environment is made anew, so that it never holds more than the lock names; the stamp comes
# last, so that an interrupted installation is repeated.
$(INSTALLED): requirements.lock
	@python=$$(for name in python3 python3.13 python3.12 python3.11; do \
	  "$$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    && echo "$$name" && break; done); \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.11 or newer with its venv module was found: install both (on Debian" \
	    "and Ubuntu: apt install python3 python3-venv), then type the same again" >&2; \
	  exit 1; \
	fi; \
	echo "Installing into .venv from requirements.lock (once, a few minutes: torch is large) ..."; \
	"$$python" -m venv --clear .venv
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
