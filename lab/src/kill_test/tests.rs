use super::*;
use crate::skipped::report_skipped;

/// Returns arguments for the program built with the tests; `None` if it cannot mount.
fn test_arguments(kills: u64, kind: &str) -> Option<DeathsArguments> {
    let own = std::env::current_exe().unwrap();
    let draconis = own.parent().and_then(Path::parent).map(|dir| dir.join("draconis"));
    let is_there = draconis.as_ref().is_some_and(|draconis| draconis.exists());
    let may = std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    if !is_there || !may {
        report_skipped("deaths of workers need FUSE and the program draconis");
        return None;
    }
    Some(DeathsArguments {
        kills,
        clients: 3,
        seed: 1,
        most_ms: 20,
        kind: kind.into(),
        mke2fs: vec![],
        linger: None,
        programs: vec![],
        options: None,
        dir: std::env::temp_dir(),
        draconis,
    })
}

#[test]
fn clients_survive_worker_kills() {
    for kind in ["ext2", "ext4"] {
        let Some(arguments) = test_arguments(60, kind) else { return };
        run_test(&arguments, None).unwrap();
    }
}

#[test]
fn clients_survive_kills_at_any_delay_point() {
    for (nth, point) in DelayPoint::ALL.into_iter().enumerate() {
        let Some(arguments) = test_arguments(40, ["ext2", "ext4"][nth % 2]) else { return };
        run_test(&DeathsArguments { linger: Some(point), ..arguments }, None).unwrap();
    }
}

#[test]
fn injected_faults_are_detected() {
    for omission in InjectedFault::VISIBLE_ON_RESTART {
        let Some(arguments) = test_arguments(400, "ext2") else { return };
        let judged = run_test(&arguments, Some(omission));
        assert!(judged.is_err(), "{omission:?} is not caught");
    }
}
