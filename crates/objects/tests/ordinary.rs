//! Ordinary use with a full check after each act. `draconis-lab store-use` runs longer; `SEED`,
//! `RUNS` and `ACTS` in the environment change this one.

use draconis_objects::torture::{Usage, ordinary};

/// Returns the number in the environment variable `name`, or `otherwise`.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn stores_bear_ordinary_use() {
    let (first, acts) = (number("SEED", 1), number("ACTS", 40));
    let mut all = Usage::default();
    for seed in first..first + number("RUNS", 6) {
        match ordinary(seed, acts as usize) {
            Ok(usage) => all += usage,
            Err(violation) => panic!("SEED={seed} RUNS=1 ACTS={acts}: {violation}"),
        }
    }
    println!("{all:?}");
    assert!(all.full > 0 && all.cuts > 0 && all.cleaned > 0 && all.resized > 0, "{all:?}");
}
