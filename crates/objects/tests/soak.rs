//! Ordinary use with a full check after each act. `draconis-lab store-use` runs longer; `SEED`,
//! `RUNS` and `ACTS` in the environment change this one.

use draconis_testkit::torture::{UsageTally, run_ordinary_use};

/// Returns the number in the environment variable `name`, or `otherwise`.
fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

#[test]
#[ignore = "long: minutes: ordinary use with a full check after each step"]
fn random_ordinary_use_matches_model() {
    let (first, acts) = (env_number("SEED", 1), env_number("ACTS", 40));
    let mut all = UsageTally::default();
    for seed in first..first + env_number("RUNS", 6) {
        match run_ordinary_use(seed, acts as usize) {
            Ok(usage) => all += usage,
            Err(violation) => panic!("SEED={seed} RUNS=1 ACTS={acts}: {violation}"),
        }
    }
    println!("{all:?}");
    assert!(all.full > 0 && all.cuts > 0 && all.cleaned > 0 && all.resized > 0, "{all:?}");
}
