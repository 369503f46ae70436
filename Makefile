# Draconis. `make demo` shows it, `make test` tests it, `make install` installs it.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
# Where mount(8) looks for its helpers: there and in /usr/sbin, whatever the PREFIX.
SBINDIR ?= /sbin

.PHONY: all demo test test-all suites mutants test-often test-release applications long long-images exact matrix lint loom crash crash-store use-store faults lab bench bench-channel lab-programs install install-lab install-program install-units install-helper install-lib install-sqlite lib sqlite header wheel crates msrv semver dist deb image book fuzz fuzz-images clean

all:
	$(CARGO) build --release --locked

# Builds, tries to break out of a worker's sandbox, mounts a volume, kills its worker under a copy,
# has the volume judged.
demo:
	@tools/packages demo
	@echo "building the program for the tour, not optimised: about three minutes and 600 MB the first time; the tour takes five seconds, beside other work up to a minute, and 400 MB of $${TMPDIR:-/tmp}"
	$(CARGO) build --profile demo --no-default-features --locked
	@tools/demo $(or $(CARGO_TARGET_DIR),target)/demo/draconis

# Every capability in its short form. Needs e2fsprogs; fuse3, attr and acl for all of it, and root to
# compare with the kernel.
test:
	@echo "builds the tests and runs them: about 17 minutes and 2.2 GB of disk on 2 cores (here: $$(nproc))"
	@tools/packages test
	@tools/test-run

# The rest: lint, documentation, Python, what takes minutes or programs of others, suites of
# others. Installs what it needs, and says what it could not have: make test-all ONLY=lint,python
test-all:
	@tools/test-all $(ONLY)

# Others' suites on mounts, the kernel's driver beside each: make suites SECONDS=60 ONLY=fsx,stress-ng
# ON=ext4. Needs root.
suites:
	@tools/packages test-all
	$(CARGO) build --release --locked
	tools/suites --program target/release/draconis --seconds $(or $(SECONDS),30) --seed $(or $(SEED),1) \
		$(if $(ONLY),--only $(ONLY)) $(if $(ON),--on $(ON))

# Seeded bugs that no test finds, in the code that data depends on: make mutants SHARD=7/120
mutants:
	tools/mutants $(or $(SHARD),1/120) $(CRATES)

# Looks for tests that do not always pass: all of them, or those of the binaries TESTS whose names
# contain ONLY, again and again, the second half of the runs beside eight busy processes:
# make test-often RUNS=10 TESTS=mounts,nbd ONLY=keeper LONG=1
test-often:
	@tools/packages test
	@tools/test-run --build $(if $(LONG),--long)
	@tools/test-often $(or $(RUNS),10) tools/test-run $(if $(LONG),--long) $(if $(TESTS),--in $(TESTS)) $(if $(ONLY),--only $(ONLY))

# The tests of the commands against the program as it ships: optimised, without fault hooks.
test-release:
	@tools/packages test-all
	$(CARGO) build --release --locked
	@if grep -q DRACONIS_BREAK target/release/draconis; then echo "the program has fault hooks"; exit 1; fi
	DRACONIS_PROGRAM=$(abspath target/release/draconis) tools/test-run --in commands,disks,mounts,stores

# Programs of others on a store: SlateDB, DataFusion, zarrs, and the book's programs that use them. A
# workspace of its own, because they need some 350 crates: the first build takes about 30 minutes of
# CPU time. More kills of SlateDB's process: make applications DRACONIS_SLATEDB_KILLS=100
applications:
	$(CARGO) fmt --check --manifest-path lab/applications/Cargo.toml
	$(CARGO) test --locked --manifest-path lab/applications/Cargo.toml --target-dir target/applications

# A volume of a container image of so many MiB, from memory that does not grow with it. It needs
# twice that on the disk of TMPDIR.
long-images:
	@tools/packages test-all
	DRACONIS_IMAGE_MIB=$(or $(MIB),10240) \
		$(CARGO) test --release --locked --test commands oci::large::memory -- --nocapture

# The comparison of real trees with all of /usr, on ext2 and ext4 in every block size, optimised.
# Needs root.
long:
	@tools/packages test-all
	DRACONIS_TEST_TREE=$(or $(TREE),/usr) $(CARGO) test --release --locked --test mounts real_trees:: -- --nocapture

# A random walk over system calls beside the kernel's own driver: make exact SEED=7 STEPS=20000;
# or every combination of call, kind of file, user and state, which takes half an hour:
# make exact CASES=all. Needs root.
exact:
	@tools/packages test-all
ifdef CASES
	DRACONIS_EXACT="$(CASES)" $(CARGO) test --locked --test mounts exact::ext -- --nocapture
else
	DRACONIS_EXACT_SEED=$(or $(SEED),1) DRACONIS_EXACT_STEPS=$(or $(STEPS),10000) \
		$(CARGO) test --locked --test mounts exact::walks -- --nocapture
endif

# Volumes of every combination of features that mke2fs makes, and MORE random ones from SEED, filled
# by the kernel and read by us; KEEP=DIR keeps the images of those that fail. Needs root.
matrix:
	@tools/packages test-all
	DRACONIS_MATRIX=$(or $(MORE),50) DRACONIS_MATRIX_SEED=$(or $(SEED),1) \
		$(if $(KEEP),DRACONIS_MATRIX_KEEP=$(abspath $(KEEP))) \
		$(CARGO) test --release --locked -p draconis-ext --test main matrix:: -- --nocapture

lint:
	@tools/words
	@tools/test-habits
	@tools/environment
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items --locked

# Every order in which two threads can hand a message over.
loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom $(CARGO) test --release --locked -p draconis-exchange --lib loom

# Stores that others wrote, as far as they are here: those in C++ are the system's.
PEERS = draconis-kv,slatedb,lmdb,redb,fjall$(if $(wildcard /usr/include/leveldb/c.h),$(comma)leveldb)$(if $(wildcard /usr/include/rocksdb/c.h),$(comma)rocksdb)
comma := ,

# Every experiment of the papers on this machine, small; the page at the end is the report:
# make lab SIZE=paper OUT=results. Complete as root.
lab:
	@tools/packages bench
	$(CARGO) build --release --locked -p draconis
	@# A make of its own: which peers are there is known after their packages are installed.
	@$(MAKE) --no-print-directory lab-programs
	target/release/draconis lab run all --size $(or $(SIZE),quick) --out $(or $(OUT),lab-results)

# The kernel's driver, fuse2fs and Draconis side by side. Needs root.
bench:
	@tools/packages bench
	$(CARGO) build --release --locked -p draconis -p draconis-lab
	target/release/draconis-lab run mount tools --size $(or $(SIZE),paper) --out $(or $(OUT),lab-results)

# Power cuts at every point of real workloads: make crash STATES=100000
crash:
	$(CARGO) build --release --locked -p draconis-lab
	target/release/draconis-lab crash --states $(or $(STATES),100000)
	target/release/draconis-lab crash --journal --states $(or $(STATES),100000)
	target/release/draconis-lab crash --store --states $(or $(STATES),100000)

# Faults in mounts while clients work: workers die, hang, lie and get no memory; disks fail and are
# full. Other programs can be clients, too: make faults COUNT=3000 SEED=7 FAULTS=death
# WITH='--with "fsx -N 20000 file"'. TOTALS=FILE adds parts up. Needs FUSE, and root for all but
# deaths and hangs.
faults:
	$(CARGO) build --release --locked -p draconis -p draconis-lab
	target/release/draconis-lab faults --count $(or $(COUNT),10000) --mounts $(or $(MOUNTS),4) \
		--seed $(or $(SEED),1) $(if $(FAULTS),--fault $(FAULTS)) $(if $(TOTALS),--totals $(TOTALS)) $(WITH)

# Power cuts of object stores: every sequence of up to three steps with every subset of up to
# twelve sectors, then long runs, second power cuts and bad disks: make crash-store STATES=1000000
crash-store:
	$(CARGO) build --release --locked -p draconis-lab
	target/release/draconis-lab store-crash --sweep
	target/release/draconis-lab store-crash --states $(or $(STATES),1000000)

# Ordinary use of object stores for so long, from SEED on: loaded, overwritten, filled, emptied,
# opened again, killed, with the full check after every step: make use-store SECONDS=7200 SEED=7
use-store:
	$(CARGO) build --release --locked -p draconis-lab
	target/release/draconis-lab store-use --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1)

# What a call over a channel costs, beside a Unix socket and a pipe.
bench-channel:
	$(CARGO) bench --locked -p draconis-exchange --bench channel

# Reads many more spoilt images than the tests do, from seeds: make fuzz-images ROUNDS=50
fuzz-images:
	DRACONIS_ROUNDS=$(or $(ROUNDS),50) $(CARGO) test --release --locked -p draconis-ext --test main hostile_images:: -- --nocapture

# Coverage-guided, until stopped, or for so many seconds: make fuzz TARGET=partition FOR=300.
# Needs cargo-fuzz, and any release of Rust.
fuzz:
	@tools/fuzz $(or $(TARGET),volume) $(or $(FOR),0)

# What `draconis lab` starts. By themselves: the lab has objects compiled with what only its
# crash campaigns need.
lab-programs:
	$(CARGO) build --release --locked -p draconis-lab
	$(CARGO) build --release --locked -p draconis-peers --features $(PEERS)

# The program, its pages, completions and units; not the lab.
install:
	@echo "building the program, optimised: about 12 minutes and 2 GB the first time on 2 cores (here: $$(nproc)), without the lab (make install-lab)"
	@$(MAKE) --no-print-directory all
	@$(MAKE) --no-print-directory install-program STRIP=-s
	@$(MAKE) --no-print-directory install-units
	@$(MAKE) --no-print-directory install-helper || echo "not installed: $(SBINDIR)/mount.fuse.draconis, by which mount(8) and /etc/fstab mount: as root, make install-helper PREFIX=$(PREFIX)"
	@[ -n "$(DESTDIR)" ] || $(PREFIX)/bin/draconis upgrade

# What `draconis lab` starts: the benchmarks, and the key-value stores that they compare. LevelDB
# and RocksDB are among those where libleveldb-dev and librocksdb-dev are installed.
install-lab:
	@echo "building the lab and the stores beside it ($(PEERS)), optimised: about 40 minutes and 6 GB the first time on 2 cores (here: $$(nproc))"
	@$(MAKE) --no-print-directory lab-programs
	install -d $(DESTDIR)$(PREFIX)/bin
	install -s -m 755 $(addprefix $(or $(CARGO_TARGET_DIR),target)/release/,draconis-lab draconis-lab-peers) $(DESTDIR)$(PREFIX)/bin

# A program that is built already, with its pages and completions.
PROGRAM ?= $(or $(CARGO_TARGET_DIR),target)/release/draconis
install-program:
	install -D $(STRIP) -m 755 $(PROGRAM) $(DESTDIR)$(PREFIX)/bin/draconis
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	$(PROGRAM) manpages $(DESTDIR)$(PREFIX)/share/man/man1
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	$(PROGRAM) completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/draconis
	install -d $(DESTDIR)$(PREFIX)/share/zsh/site-functions $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(PROGRAM) completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_draconis
	$(PROGRAM) completions fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/draconis.fish

# What systemd starts, for the system and for users; by hand: systemctl enable --now draconis.socket
install-units:
	@for unit in dist/systemd/*; do for whose in system user; do \
		install -d $(DESTDIR)$(PREFIX)/lib/systemd/$$whose; \
		sed 's|/usr/bin/|$(abspath $(PREFIX))/bin/|' $$unit > $(DESTDIR)$(PREFIX)/lib/systemd/$$whose/$${unit##*/}; \
	done; done

# What is given to others, in target/dist: a static program with pages and completions as a
# tarball (dist), a Debian package (deb) and a container image (image), with SHA256SUMS.
dist:
	@tools/dist tar
deb:
	@tools/dist deb
image:
	@tools/dist image

# docs/book with the reference of every command; a book where mdbook is installed.
book: all
	@tools/book target/release/draconis

# libdraconis for programs in C, shared and static (it needs no program of ours), with its header
# and what pkg-config says of it.
lib:
	$(CARGO) rustc --release --locked -p draconis-capi --crate-type cdylib,staticlib

install-lib: lib
	install -D -m 644 crates/capi/include/draconis.h $(DESTDIR)$(PREFIX)/include/draconis.h
	install -D -m 755 target/release/libdraconis.so $(DESTDIR)$(PREFIX)/lib/libdraconis.so.0
	ln -sf libdraconis.so.0 $(DESTDIR)$(PREFIX)/lib/libdraconis.so
	install -m 644 target/release/libdraconis.a $(DESTDIR)$(PREFIX)/lib/libdraconis.a
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig
	sed 's|@PREFIX@|$(abspath $(PREFIX))|; s|@VERSION@|$(VERSION)|' crates/capi/draconis.pc.in \
		> $(DESTDIR)$(PREFIX)/lib/pkgconfig/draconis.pc
VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' Cargo.toml | head -1)

# The extension that gives SQLite databases in stores.
sqlite:
	$(CARGO) rustc --release --locked -p draconis-sqlite --lib --crate-type cdylib

install-sqlite: sqlite
	install -D -m 755 target/release/libdraconis_sqlite.so \
		$(DESTDIR)$(PREFIX)/lib/libdraconis_sqlite.so

# The package for Python, for every version from 3.9 on: a wheel in target/wheels, to be installed
# with pip.
wheel:
	@tools/python wheel

# draconis-ext, draconis-objects and what they need, as a registry would be given them, each built
# alone; with the oldest Rust they promise; beside an earlier commit: make semver REV=COMMIT
crates:
	@tools/crates package
msrv:
	@tools/crates msrv
semver:
	@REV=$(REV) tools/crates semver

# The header, of the sources. Needs cbindgen (0.29), which is only run.
header:
	@tools/header > crates/capi/include/draconis.h.new
	@mv crates/capi/include/draconis.h.new crates/capi/include/draconis.h

# What mount(8) runs for the types fuse.draconis and draconis.
install-helper:
	install -d $(DESTDIR)$(SBINDIR)
	ln -sf $(abspath $(PREFIX))/bin/draconis $(DESTDIR)$(SBINDIR)/mount.fuse.draconis
	ln -sf $(abspath $(PREFIX))/bin/draconis $(DESTDIR)$(SBINDIR)/mount.draconis

clean:
	$(CARGO) clean
