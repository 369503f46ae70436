//! Power cuts, judged: the short form. The long one is `draconis-lab store-crash`.

use draconis_device::CrashOptions;
use draconis_objects::torture::{self, Before, Effort, Harm, Settings, Shape, Tally};

/// The seed, or its number, in `NAME` of the environment.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

fn options(seed: u64) -> CrashOptions {
    CrashOptions { seed, subsets: 12, exhaustive_sectors: 6 }
}

#[test]
fn long_runs() {
    let first = number("SEED", 1);
    let began = std::time::Instant::now();
    let mut all = Tally::default();
    for seed in first..first + number("RUNS", 12) {
        let shape = Shape::ALL[(seed % 4) as usize];
        let script = torture::random(seed, shape, 120);
        match torture::cut(shape, &script, options(seed), Effort::SOME, Settings::USUAL) {
            Ok(tally) => all += tally,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?} in {:?}", began.elapsed());
}

#[test]
fn sequences() {
    let began = std::time::Instant::now();
    let groups = number("LETTERS", 2) as usize;
    let mut all = Tally::default();
    for shape in Shape::ALL {
        for nth in 0..torture::sequences(groups) {
            let script = torture::sequence(groups, nth, shape);
            let exhaustive_sectors = number("SECTORS", 12) as u32;
            let options = CrashOptions { seed: nth as u64, subsets: 8, exhaustive_sectors };
            match torture::cut(shape, &script, options, Effort::SOME, Settings::USUAL) {
                Ok(tally) => all += tally,
                Err(violation) => panic!("{shape:?}, sequence {nth}, {script:?}: {violation}"),
            }
        }
    }
    println!("{all:?} in {:?}", began.elapsed());
}

/// What was there before: noise, an older store, one with pages of another size.
#[test]
fn making() {
    let began = std::time::Instant::now();
    let mut all = Tally::default();
    for shape in Shape::ALL {
        let shape = Shape { disk_bytes: 2 << 20, ..shape };
        let larger = Shape { page_bytes: 8192, segment_bytes: 32 << 10, ..shape };
        for (nth, older) in [None, Some(shape), Some(larger)].into_iter().enumerate() {
            // Two stores of one name are told apart by their incarnations, as long as what was
            // first written to both is alike.
            for is_namesake in [false, true].into_iter().filter(|it| !it || nth < 2) {
                let seed = number("SEED", 7) + nth as u64;
                let script = torture::random(seed, shape, 40);
                let before = older.map_or(Before::Noise, |of| Before::Store(of, &script));
                let options = CrashOptions { seed, subsets: 100, exhaustive_sectors: 12 };
                match torture::making(shape, before, is_namesake, options, Settings::USUAL) {
                    Ok(tally) => all += tally,
                    Err(violation) => {
                        panic!("{shape:?} over {older:?}, {is_namesake}: {violation}")
                    }
                }
            }
        }
    }
    println!("{all:?} in {:?}", began.elapsed());
}

#[test]
fn damaged_disks() {
    let first = number("SEED", 1);
    let mut all = Harm::default();
    for seed in first..first + number("RUNS", 12) {
        let shape = Shape::ALL[(seed % 4) as usize];
        let script = torture::random(seed, shape, 100);
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
    let mut all = Harm::default();
    for seed in first..first + number("RUNS", 300) {
        let shape = Shape::ALL[(seed % 4) as usize];
        let script = torture::random(seed / 8, shape, 100);
        match torture::fail(shape, &script, seed, Settings::USUAL) {
            Ok(harm) => all += harm,
            Err(violation) => panic!("SEED={seed} RUNS=1: {shape:?}: {violation}"),
        }
    }
    println!("{all:?}");
}
