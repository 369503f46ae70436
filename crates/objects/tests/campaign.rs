//! Power-cut campaign, short form. The long one is `draconis-lab store-crash`; `RUNS`, `LETTERS`
//! and `SECTORS` in the environment make this one longer.

use draconis_device::CrashOptions;
use draconis_objects::torture::{self, DamageTally, Effort, Settings, Shape, Tally, Violation};

/// Returns the number in the environment variable `name`, or `otherwise`.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

fn options(seed: u64) -> CrashOptions {
    CrashOptions { seed, subsets: 12, exhaustive_sectors: 6 }
}

#[test]
fn long_runs() {
    let first = number("SEED", 1);
    let mut all = Tally::default();
    for seed in first..first + number("RUNS", 12) {
        let shape = Shape::ALL[(seed % 4) as usize];
        let script = torture::random(seed, shape, 120);
        match torture::cut(shape, &script, options(seed), Effort::SOME, Settings::USUAL) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}

/// Value objects, payloads at odd bytes, holes, groups over several segments.
fn large(seed: u64) -> Result<Tally, Violation> {
    let shape = Shape::ALL[(seed % 4) as usize];
    let script = torture::random_large(seed, shape, 100);
    torture::cut(shape, &script, options(seed), Effort::SOME, Settings::USUAL)
}

#[test]
fn large_runs() {
    let first = number("SEED", 1);
    let mut all = Tally::default();
    for seed in first..first + number("RUNS", 8) {
        match large(seed) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}");
}

/// Segments of real sizes.
#[test]
fn real_segments() {
    let first = number("SEED", 1);
    let mut all = Tally::default();
    for seed in first..first + number("RUNS", 1) {
        let shape = Shape::REAL[(number("SHAPE", 0) % 2) as usize];
        let script = torture::random_large(seed, shape, 60);
        let effort = Effort { second_cut: 100, ..Effort::SOME };
        match torture::cut(shape, &script, options(seed), effort, Settings::USUAL) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}

#[test]
fn sequences() {
    let groups = number("LETTERS", 2) as usize;
    let mut all = Tally::default();
    for shape in Shape::ALL {
        for nth in 0..torture::sequences(groups) {
            let script = torture::sequence(groups, nth, shape);
            let exhaustive_sectors = number("SECTORS", 8) as u32;
            let options = CrashOptions { seed: nth as u64, subsets: 8, exhaustive_sectors };
            match torture::cut(shape, &script, options, Effort::SOME, Settings::USUAL) {
                Ok(tally) => all += tally,
                Err(violation) => panic!("{shape:?}, sequence {nth}, {script:?}: {violation}"),
            }
        }
    }
    println!("{all:?}");
}

#[test]
fn making() {
    let first = number("SEED", 1);
    let mut all = Tally::default();
    for seed in first..first + number("RUNS", 4) {
        match torture::make_over(seed, Settings::USUAL) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}");
}

#[test]
fn damaged_disks() {
    let first = number("SEED", 1);
    let mut all = DamageTally::default();
    for seed in first..first + number("RUNS", 12) {
        let shape = Shape::ALL[(seed % 4) as usize];
        let script = match seed % 3 {
            0 => torture::random_large(seed, shape, 60),
            _ => torture::random(seed, shape, 100),
        };
        match torture::damage(shape, &script, 60, Settings::USUAL) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
    assert!(all.refused > 0 && all.unreadable > 0);
}

#[test]
fn failing_disks() {
    let first = number("SEED", 1);
    let mut all = DamageTally::default();
    for seed in first..first + number("RUNS", 80) {
        let shape = Shape::ALL[(seed % 4) as usize];
        let script = torture::random(seed / 8, shape, 100);
        match torture::fail(shape, &script, seed, Settings::USUAL) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}
