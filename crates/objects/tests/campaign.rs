//! Power-cut campaign, short form. The long one is `draconis-lab store-crash`; `RUNS`, `LETTERS`
//! and `SECTORS` in the environment make this one longer.

use draconis_objects::test_hooks::TestSettings;
use draconis_testkit::CrashOptions;
use draconis_testkit::torture::{
    self, CheckFrequencies, DamageTally, RunTally, StoreShape, Violation,
};

/// Returns the number in the environment variable `name`, or `otherwise`.
fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

fn options(seed: u64) -> CrashOptions {
    CrashOptions { seed, subsets: 12, exhaustive_sectors: 6 }
}

#[test]
fn random_scripts_survive_power_cuts() {
    cut_power_of_random_scripts(4);
}

#[test]
#[ignore = "long: more seeds"]
fn more_random_scripts_survive_power_cuts() {
    cut_power_of_random_scripts(12);
}

fn cut_power_of_random_scripts(runs: u64) {
    let first = env_number("SEED", 1);
    let mut all = RunTally::default();
    for seed in first..first + env_number("RUNS", runs) {
        let shape = StoreShape::ALL[(seed % 4) as usize];
        let script = torture::random(seed, shape, 120);
        match torture::run_with_power_cuts(
            shape,
            &script,
            options(seed),
            CheckFrequencies::SAMPLED,
            TestSettings::NORMAL,
        ) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}

/// Value objects, payloads at odd bytes, holes, groups over several segments.
fn large_script_run(seed: u64) -> Result<RunTally, Violation> {
    let shape = StoreShape::ALL[(seed % 4) as usize];
    let script = torture::random_large(seed, shape, 100);
    torture::run_with_power_cuts(
        shape,
        &script,
        options(seed),
        CheckFrequencies::SAMPLED,
        TestSettings::NORMAL,
    )
}

#[test]
#[ignore = "long: a minute: large scripts"]
fn large_scripts_survive_power_cuts() {
    let first = env_number("SEED", 1);
    let mut all = RunTally::default();
    for seed in first..first + env_number("RUNS", 8) {
        match large_script_run(seed) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}");
}

/// Segments of real sizes.
#[test]
fn real_segment_sizes_survive_power_cuts() {
    let first = env_number("SEED", 1);
    let mut all = RunTally::default();
    for seed in first..first + env_number("RUNS", 1) {
        let shape = StoreShape::REAL_SIZES[(env_number("SHAPE", 0) % 2) as usize];
        let script = torture::random_large(seed, shape, 60);
        let effort = CheckFrequencies { second_cut: 100, ..CheckFrequencies::SAMPLED };
        match torture::run_with_power_cuts(
            shape,
            &script,
            options(seed),
            effort,
            TestSettings::NORMAL,
        ) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}

#[test]
#[ignore = "long: minutes: every sequence"]
fn all_step_sequences_survive_power_cuts() {
    let groups = env_number("LETTERS", 2) as usize;
    let mut all = RunTally::default();
    for shape in StoreShape::ALL {
        for nth in 0..torture::sequence_count(groups) {
            let script = torture::sequence(groups, nth, shape);
            let exhaustive_sectors = env_number("SECTORS", 8) as u32;
            let options = CrashOptions { seed: nth as u64, subsets: 8, exhaustive_sectors };
            match torture::run_with_power_cuts(
                shape,
                &script,
                options,
                CheckFrequencies::SAMPLED,
                TestSettings::NORMAL,
            ) {
                Ok(tally) => all += tally,
                Err(violation) => panic!("{shape:?}, sequence {nth}, {script:?}: {violation}"),
            }
        }
    }
    println!("{all:?}");
}

#[test]
fn store_creation_survives_power_cuts() {
    let first = env_number("SEED", 1);
    let mut all = RunTally::default();
    for seed in first..first + env_number("RUNS", 4) {
        match torture::create_over_old_contents(seed, TestSettings::NORMAL) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {violation}"),
        }
    }
    println!("{all:?}");
}

#[test]
fn damaged_disks_are_detected() {
    let first = env_number("SEED", 1);
    let mut all = DamageTally::default();
    for seed in first..first + env_number("RUNS", 12) {
        let shape = StoreShape::ALL[(seed % 4) as usize];
        let script = match seed % 3 {
            0 => torture::random_large(seed, shape, 60),
            _ => torture::random(seed, shape, 100),
        };
        match torture::run_with_damage(shape, &script, 60, TestSettings::NORMAL) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
    assert!(all.refused > 0 && all.unreadable > 0);
}

#[test]
fn failing_disks_lose_nothing_durable() {
    let first = env_number("SEED", 1);
    let mut all = DamageTally::default();
    for seed in first..first + env_number("RUNS", 80) {
        let shape = StoreShape::ALL[(seed % 4) as usize];
        let script = torture::random(seed / 8, shape, 100);
        match torture::run_with_failures(shape, &script, seed, TestSettings::NORMAL) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}
