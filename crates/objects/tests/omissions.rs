//! Mutation tests of the campaign: with one flush, checksum or dependency omitted, it must fail.

use draconis_device::CrashOptions;
use draconis_objects::torture::{self, Effort, InjectedFault, Settings, Shape, Violation};

const EFFORT: Effort = Effort { second_life: 2, second_cut: 8, emptied: 0, read_only: 0 };

/// Runs with power cuts, until one violates a guarantee.
fn cuts(settings: Settings) -> Option<Violation> {
    (1..40).find_map(|seed| {
        let shape = Shape::ALL[(seed % 2) as usize];
        let script = torture::random(seed, shape, 60);
        let options = CrashOptions { seed, subsets: 8, exhaustive_sectors: 5 };
        torture::cut(shape, &script, options, EFFORT, settings).err()
    })
}

/// Runs with damaged disks, until one violates a guarantee.
fn damages(settings: Settings) -> Option<Violation> {
    (1..120).find_map(|seed| {
        let shape = Shape::ALL[(seed % 4) as usize];
        torture::damage(shape, &torture::random(seed, shape, 60), 60, settings).err()
    })
}

/// Creates stores with power cuts, until one violates a guarantee.
fn makings(settings: Settings) -> Option<Violation> {
    (1..20).find_map(|seed| torture::make_over(seed, settings).err())
}

fn with(without: InjectedFault) -> Settings {
    Settings { fault: Some(without), ..Settings::USUAL }
}

fn quiet() {
    std::panic::set_hook(Box::new(|_| {}));
}

/// Campaign that must detect an omission.
type Find = fn(Settings) -> Option<Violation>;

const ALL: [(InjectedFault, Find); 15] = [
    (InjectedFault::Flush, cuts),
    (InjectedFault::SuperblockAfterFrames, cuts),
    (InjectedFault::Barrier, cuts),
    (InjectedFault::FreeAfterCheckpoint, cuts),
    (InjectedFault::NoGaps, cuts),
    (InjectedFault::WholeCommits, cuts),
    (InjectedFault::VerifiedReplay, cuts),
    (InjectedFault::Incarnation, cuts),
    (InjectedFault::ForkZeros, cuts),
    (InjectedFault::Wipe, makings),
    (InjectedFault::FrameSum, damages),
    (InjectedFault::DurableMark, damages),
    (InjectedFault::PayloadSum, damages),
    (InjectedFault::NodeSum, damages),
    (InjectedFault::SuperblockSum, damages),
];

#[test]
fn every_omission_is_found() {
    quiet();
    let only = std::env::var("ONLY").ok();
    let unseen: Vec<_> = ALL
        .iter()
        .filter(|(what, _)| only.as_ref().is_none_or(|only| format!("{what:?}").contains(only)))
        .filter(|(what, find)| {
            let began = std::time::Instant::now();
            let found = find(with(*what));
            let text =
                found.as_ref().map_or("NOT FOUND", |it| it.0.lines().next().unwrap_or_default());
            println!("{what:?} ({:.1?}): {text}", began.elapsed());
            found.is_none()
        })
        .map(|(what, _)| *what)
        .collect();
    assert!(unseen.is_empty(), "not found: {unseen:?}");
}
