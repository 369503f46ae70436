//! Mutation tests of the campaign: with one flush, checksum or dependency omitted, it must fail.

use draconis_objects::test_hooks::{InjectedFault, TestSettings};
use draconis_testkit::CrashOptions;
use draconis_testkit::torture::{self, CheckFrequencies, StoreShape, Violation};

const CHECK_FREQUENCIES: CheckFrequencies =
    CheckFrequencies { second_life: 2, second_cut: 8, emptied: 0, read_only: 0 };

/// Runs with power cuts, until one violates a guarantee.
fn find_with_power_cuts(settings: TestSettings) -> Option<Violation> {
    (1..40).find_map(|seed| {
        let shape = StoreShape::ALL[(seed % 2) as usize];
        let script = torture::random(seed, shape, 60);
        let options = CrashOptions { seed, subsets: 8, exhaustive_sectors: 5 };
        torture::run_with_power_cuts(shape, &script, options, CHECK_FREQUENCIES, settings).err()
    })
}

/// Runs with damaged disks, until one violates a guarantee.
fn find_with_damaged_disks(settings: TestSettings) -> Option<Violation> {
    (1..120).find_map(|seed| {
        let shape = StoreShape::ALL[(seed % 4) as usize];
        torture::run_with_damage(shape, &torture::random(seed, shape, 60), 60, settings).err()
    })
}

/// Creates stores with power cuts, until one violates a guarantee.
fn find_with_store_creation(settings: TestSettings) -> Option<Violation> {
    (1..20).find_map(|seed| torture::create_over_old_contents(seed, settings).err())
}

fn settings_with_fault(without: InjectedFault) -> TestSettings {
    TestSettings { fault: Some(without), ..TestSettings::NORMAL }
}

fn silence_panic_messages() {
    std::panic::set_hook(Box::new(|_| {}));
}

/// Campaign that must detect an omission.
type ViolationSearch = fn(TestSettings) -> Option<Violation>;

const FAULTS_AND_SEARCHES: [(InjectedFault, ViolationSearch); 15] = [
    (InjectedFault::Flush, find_with_power_cuts),
    (InjectedFault::SuperblockAfterFrames, find_with_power_cuts),
    (InjectedFault::Barrier, find_with_power_cuts),
    (InjectedFault::FreeAfterCheckpoint, find_with_power_cuts),
    (InjectedFault::NoGaps, find_with_power_cuts),
    (InjectedFault::WholeCommits, find_with_power_cuts),
    (InjectedFault::VerifiedReplay, find_with_power_cuts),
    (InjectedFault::Incarnation, find_with_power_cuts),
    (InjectedFault::ForkZeros, find_with_power_cuts),
    (InjectedFault::Wipe, find_with_store_creation),
    (InjectedFault::FrameSum, find_with_damaged_disks),
    (InjectedFault::DurableMark, find_with_damaged_disks),
    (InjectedFault::PayloadSum, find_with_damaged_disks),
    (InjectedFault::NodeSum, find_with_damaged_disks),
    (InjectedFault::SuperblockSum, find_with_damaged_disks),
];

#[test]
#[ignore = "long: half a minute: a campaign for each fault"]
fn every_injected_fault_is_detected() {
    draconis_testkit::in_own_process!();
    silence_panic_messages();
    let only = std::env::var("ONLY").ok();
    let unseen: Vec<_> = FAULTS_AND_SEARCHES
        .iter()
        .filter(|(what, _)| only.as_ref().is_none_or(|only| format!("{what:?}").contains(only)))
        .filter(|(what, find)| {
            let (found, time) =
                draconis_testkit::wait::measure(|| find(settings_with_fault(*what)));
            let text =
                found.as_ref().map_or("NOT FOUND", |it| it.0.lines().next().unwrap_or_default());
            println!("{what:?} ({time:.1?}): {text}");
            found.is_none()
        })
        .map(|(what, _)| *what)
        .collect();
    assert!(unseen.is_empty(), "not found: {unseen:?}");
}
