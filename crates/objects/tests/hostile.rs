//! Damaged stores: no panic, no hang, bounded memory. Without checksum verification, decoders see
//! the damage; checksums can be forged, so they must survive it.

use draconis_device::Random;
use draconis_objects::Error;
use draconis_objects::test_hooks::{InjectedFault, TestSettings};
use draconis_testkit::torture::{self};
use draconis_testkit::wait::HangClock;

fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(otherwise)
}

fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn run_corrupt_images(
    without: Option<InjectedFault>,
    rounds: u64,
    exercise: fn(Vec<u8>) -> Result<u64, Error>,
) -> (u64, u64) {
    let (first, mut opened, mut refused) = (env_number("SEED", 0), 0, 0);
    let mut bases = vec![];
    for seed in 0..16 {
        bases.push(torture::base_image(seed).unwrap());
    }
    draconis_objects::test_hooks::set_thread_settings(TestSettings {
        fault: without,
        ..TestSettings::NORMAL
    });
    for seed in first..first + env_number("RUNS", rounds) {
        let mut image = bases[(seed % 16) as usize].clone();
        torture::corrupt_image(&mut image, &mut Random::new(seed));
        let clock = HangClock::start();
        let outcome = std::panic::catch_unwind(|| exercise(image));
        clock.assert_not_hung(format_args!("SEED={seed} RUNS=1"));
        match outcome.unwrap_or_else(|_| panic!("SEED={seed} RUNS=1 {without:?}: panicked")) {
            Ok(_) => opened += 1,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
        }
    }
    draconis_objects::test_hooks::set_thread_settings(TestSettings::NORMAL);
    assert!(peak_bytes() < 1 << 30, "{} bytes of memory", peak_bytes());
    (opened, refused)
}

#[test]
fn corrupt_images_do_not_panic() {
    draconis_testkit::in_own_process!();
    let (opened, refused) = run_corrupt_images(None, 1500, torture::exercise_image);
    println!("{opened} opened, {refused} refused");
}

#[test]
fn corrupt_images_with_valid_checksums_do_not_panic() {
    draconis_testkit::in_own_process!();
    let (opened, refused) =
        run_corrupt_images(Some(InjectedFault::Sums), 1500, torture::exercise_image);
    println!("{opened} opened, {refused} refused");
}

#[test]
fn salvage_of_corrupt_images_does_not_panic() {
    draconis_testkit::in_own_process!();
    for without in [None, Some(InjectedFault::Sums)] {
        let (salvaged, refused) = run_corrupt_images(without, 150, torture::salvage_image);
        println!("{without:?}: {salvaged} salvaged, {refused} refused");
        assert!(without.is_some() || refused < 10, "{refused} refused");
    }
}

/// Fuzzer corpus with high code coverage: each input, prefixed with its length. When the on-disk
/// format changes, it covers less and must be regenerated: `make fuzz TARGET=store`, `cargo fuzz
/// cmin store`.
const FUZZER_INPUT: &[u8] = include_bytes!("fuzzed.bin");

#[test]
fn fuzzer_input_does_not_panic() {
    draconis_testkit::in_own_process!();
    let bases: Vec<_> = (0..8).map(|seed| torture::base_image(seed).unwrap()).collect();
    draconis_objects::test_hooks::set_thread_settings(TestSettings {
        fault: Some(InjectedFault::Sums),
        ..TestSettings::NORMAL
    });
    let (mut rest, mut opened, mut inputs) = (FUZZER_INPUT, 0, 0);
    while let [low, high, more @ ..] = rest {
        let (input, behind) = more.split_at(usize::from(u16::from_le_bytes([*low, *high])));
        rest = behind;
        inputs += 1;
        let Some(image) = torture::image_from_fuzz_input(&bases, input) else { continue };
        let clock = HangClock::start();
        opened += u64::from(torture::exercise_image(image).is_ok());
        clock.assert_not_hung(format_args!("input {inputs}"));
    }
    draconis_objects::test_hooks::set_thread_settings(TestSettings::NORMAL);
    println!("{inputs} inputs, {opened} opened");
    assert!(inputs > 300 && opened > 100);
}
