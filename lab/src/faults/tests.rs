use std::path::Path;

use super::*;
use draconis_testkit::report_skipped;

/// Returns arguments for the program built with the tests; `None` if it cannot mount.
fn test_arguments(kind: FaultKind, count: u64, volume: &str) -> Option<FaultsArguments> {
    let own = std::env::current_exe().unwrap();
    let draconis = own.parent().and_then(Path::parent).map(|dir| dir.join("draconis"));
    let is_there = draconis.as_ref().is_some_and(|draconis| draconis.exists());
    let may = std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    if !is_there || !may {
        report_skipped("faults in mounts need FUSE and the program draconis");
        return None;
    }
    Some(FaultsArguments {
        kinds: vec![kind],
        count,
        seconds: None,
        mounts: 1,
        clients: 3,
        seed: 1,
        most_ms: 20,
        volumes: vec![volume.into()],
        mke2fs: vec![],
        linger: None,
        programs: vec![],
        options: None,
        dir: std::env::temp_dir(),
        draconis,
        most: None,
        totals: None,
        json: false,
    })
}

#[test]
fn clients_survive_worker_kills() {
    for volume in ["ext2", "ext4"] {
        let Some(arguments) = test_arguments(FaultKind::Death, 60, volume) else { return };
        run(&arguments).unwrap();
    }
}

#[test]
fn clients_survive_kills_at_any_delay_point() {
    for (nth, point) in DelayPoint::ALL.into_iter().enumerate() {
        let volume = ["ext2", "ext4"][nth % 2];
        let Some(arguments) = test_arguments(FaultKind::Death, 40, volume) else { return };
        run(&FaultsArguments { linger: Some(point), ..arguments }).unwrap();
    }
}

#[test]
fn clients_survive_faults_of_every_kind() {
    let Some(arguments) = test_arguments(FaultKind::Hang, 24, "ext4") else { return };
    if !rustix::process::geteuid().is_root() {
        report_skipped("forged messages and limits of memory need root");
        return;
    }
    let kinds = FaultKind::ALL[1..].to_vec();
    run(&FaultsArguments { kinds, mounts: 5, most: Some(5), ..arguments }).unwrap();
}

#[test]
fn injected_faults_are_detected() {
    for omission in InjectedFault::VISIBLE_ON_RESTART {
        let Some(arguments) = test_arguments(FaultKind::Death, 400, "ext2") else { return };
        let judged = run_rounds(&arguments, Some(omission));
        assert!(judged.is_err(), "{omission:?} is not caught");
    }
}
