//! Multi-mount protection: claims, renewals, releases, and refusals while another host uses the
//! volume; compared with the kernel.

use std::cell::Cell;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::FILE;
use crate::common::storm::write_options;
use crate::common::{Image, run_tool};
use draconis_device::{Disk, FileDisk, FileOptions};
use draconis_ext::grow::GrowPlan;
use draconis_ext::shrink::ShrinkPlan;
use draconis_ext::tune::{TuneChanges, tune};
use draconis_ext::{Error, MmpClaim, MmpClaimOptions, OpenOptions, Volume, recover_unmounted};
use draconis_types::Time;

const NOW: Time = Time { seconds: 1_700_000_000, nanoseconds: 0 };

fn make_mmp_image(features: &str) -> Option<Image> {
    let interval = "mmp_update_interval=1";
    Image::make(None, "16M", &["-t", "ext4", "-b", "1024", "-O", features, "-E", interval])
}

/// Claims the volume, with `wait` as the clock.
fn acquire_claim(
    disk: &Arc<dyn Disk>,
    chance: u32,
    wait: &dyn Fn(Duration),
) -> Result<Option<MmpClaim>, Error> {
    let most_wait = Duration::from_secs(50);
    MmpClaim::acquire(
        disk,
        &MmpClaimOptions { now: NOW, random: chance, node: "a host", wait, max_wait: most_wait },
    )
}

fn dump_mmp_sequence(bytes: &[u8]) -> String {
    let said = Image::from_bytes(bytes).debugfs("dump_mmp").unwrap();
    said.lines().find(|line| line.starts_with("sequence")).unwrap_or(&said).to_owned()
}

#[test]
fn claimed_volume_is_written_renewed_and_released() {
    for features in ["mmp", "mmp,^metadata_csum"] {
        let Some(image) = make_mmp_image(features) else { return };
        let disk = image.memory_disk();
        let shared: Arc<dyn Disk> = disk.clone();
        let waited = Mutex::new(vec![]);
        let wait = |time: Duration| waited.lock().unwrap().push(time.as_secs());
        let mine = acquire_claim(&shared, 41, &wait).unwrap();
        assert_eq!(*waited.lock().unwrap(), [11], "the kernel's least");
        let volume =
            Volume::open_with_claim(shared.clone(), OpenOptions::default(), write_options(), mine)
                .unwrap();
        assert_eq!(volume.read_only_reason(), None);
        volume.create(volume.root(), b"ours", &FILE).unwrap();
        volume.sync().unwrap();
        assert_eq!(volume.renew_claim(), Ok(Some(Duration::from_secs(1))));

        // Another host sees the sequence number change while it waits.
        let other = acquire_claim(&shared, 77, &|_| drop(volume.renew_claim()));
        let Err(Error::InUse { by }) = other else { panic!("{other:?}") };
        assert!(by.contains("a host"), "{by}");

        volume.close().unwrap();
        assert_eq!(volume.renew_claim(), Ok(None));
        assert!(matches!(volume.reopen(), Err(Error::Unsupported { .. })));
        drop((volume, shared));
        let bytes = Arc::into_inner(disk).unwrap().into_bytes();
        assert!(dump_mmp_sequence(&bytes).contains("ff4d4d50"), "{}", dump_mmp_sequence(&bytes));
        assert!(run_tool("e2fsck", &["-fn", Image::from_bytes(&bytes).path()]).is_some());
    }
}

#[test]
fn stale_claims_are_taken_over_and_live_ones_refused() {
    let Some(image) = make_mmp_image("mmp") else { return };
    let disk: Arc<dyn Disk> = image.memory_disk();
    // Two hosts at once: the last writer wins.
    let rival = Cell::new(None);
    let first =
        acquire_claim(&disk, 1, &|_| rival.set(acquire_claim(&disk, 2, &|_| {}).ok().flatten()));
    assert!(matches!(first, Err(Error::InUse { .. })), "{first:?}");
    // It dies: the sequence stays the same for two check intervals, before and after the claim.
    let rival = rival.into_inner().unwrap();
    let waits = Cell::new(0);
    let second = acquire_claim(&disk, 3, &|_| waits.set(waits.get() + 1)).unwrap().unwrap();
    assert_eq!(waits.get(), 2);
    // The rival was only suspended.
    assert!(matches!(rival.renew(NOW), Err(Error::InUse { .. })));
    let volume = Volume::open_with_claim(
        disk.clone(),
        OpenOptions::default(),
        write_options(),
        Some(second),
    );
    let volume = volume.unwrap();
    let third = acquire_claim(&disk, 4, &|_| {}).unwrap();
    assert!(matches!(volume.renew_claim(), Err(Error::InUse { .. })));
    assert!(!volume.is_writable() && volume.failure().is_some());
    assert!(volume.create(volume.root(), b"no", &FILE).is_err());
    // Without waiting, after a previous process of this host.
    drop(third);
    let how = MmpClaimOptions {
        now: NOW,
        random: 5,
        node: "",
        wait: &|_| panic!("nothing is waited for"),
        max_wait: Duration::ZERO,
    };
    assert!(MmpClaim::resume(&disk, &how).unwrap().is_some());
    let long = MmpClaim::acquire(&disk, &how).map(drop);
    assert!(matches!(long, Err(Error::Unsupported { .. })), "{long:?}");
}

/// Waits as long as the kernel: 11 s.
#[test]
fn kernel_and_draconis_exclude_each_other() {
    let Some(image) = make_mmp_image("mmp") else { return };
    let open = || -> Arc<dyn Disk> {
        let file = fs::OpenOptions::new().read(true).write(true).open(&image.path).unwrap();
        let options = FileOptions { write: true, direct: true, uring: false };
        Arc::new(FileDisk::from_fd(file.into(), options).unwrap())
    };
    let disk = open();
    let Ok(Some(mine)) = acquire_claim(&disk, 9, &|_| {}) else { panic!("nothing else has it") };
    let at = image.dir.path().join("mnt");
    fs::create_dir(&at).unwrap();
    let ends = AtomicBool::new(false);
    let refused = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                mine.renew(NOW).unwrap();
                draconis_testkit::wait::pause(
                    "a claim is renewed at intervals",
                    Duration::from_millis(100),
                );
            }
        });
        let mounted = Command::new("mount").args(["-o", "loop", image.path()]).arg(&at).status();
        ends.store(true, Ordering::Relaxed);
        !mounted.is_ok_and(|status| status.success())
    });
    assert!(refused, "the kernel took what we have");
    mine.release(NOW).unwrap();
    let Some(mount) = image.mount_writable() else { return };
    fs::write(mount.path().join("theirs"), "x").unwrap();
    let disk = open();
    let taken = acquire_claim(&disk, 10, &|_| {
        draconis_testkit::wait::pause("the other one renews its claim", Duration::from_millis(2500))
    });
    assert!(matches!(taken, Err(Error::InUse { .. })), "{taken:?}");
    drop(mount);
    assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some());
}

#[test]
fn tool_claim_excludes_others_until_released() {
    for features in ["mmp", "mmp,^metadata_csum"] {
        let Some(image) = make_mmp_image(features) else { return };
        let disk: Arc<dyn Disk> = image.memory_disk();
        let how = |wait: &dyn Fn(Duration)| {
            let most_wait = Duration::from_secs(50);
            recover_unmounted(
                &disk,
                &MmpClaimOptions { now: NOW, random: 3, node: "a tool", wait, max_wait: most_wait },
            )
        };
        let words = |words: &[&str]| {
            let features = words.iter().map(|word| (*word).to_owned()).collect();
            TuneChanges { features, ..TuneChanges::default() }
        };
        // Offline changes need the claim.
        let error = tune(&disk, &words(&["^mmp"]), NOW).unwrap_err();
        assert!(error.to_string().contains("a claim"), "{error}");
        assert!(GrowPlan::plan(&disk, 32 << 20).is_err() && ShrinkPlan::plan(&disk, None).is_err());

        let (_, mine) = how(&|_| {}).unwrap();
        let mine = mine.unwrap();
        let other = acquire_claim(&disk, 4, &|_| {});
        let Err(Error::InUse { by }) = other else { panic!("{other:?}") };
        assert!(by.contains("clear_mmp") && by.contains("a tool"), "{by}");
        let lent = Some(mine.borrow());
        let volume =
            Volume::open_with_claim(disk.clone(), OpenOptions::default(), write_options(), lent);
        let volume = volume.unwrap();
        volume.create(volume.root(), b"ours", &FILE).unwrap();
        volume.close().unwrap();
        drop(volume);
        let label = TuneChanges { label: Some(b"l".to_vec()), ..words(&[]) };
        tune(&disk, &label, NOW).unwrap();
        let shrinking = ShrinkPlan::plan(&disk, None).unwrap();
        let target =
            draconis_ext::shrink::ShrinkTarget { disk: &*disk, now: NOW, progress: &|_| () };
        shrinking.write(&target).unwrap();
        mine.renew(NOW).unwrap();
        mine.release(NOW).unwrap();

        let judged = |what: &str| {
            let mut bytes = vec![0; 16 << 20];
            let all = draconis_types::Block::private(bytes.len());
            let extent = draconis_device::Extent::new(0, bytes.len() as u64);
            disk.read_now(extent, all).unwrap().copy_out(0, &mut bytes);
            let image = Image::from_bytes(&bytes);
            assert!(run_tool("e2fsck", &["-fn", image.path()]).is_some(), "{what}");
            bytes
        };
        assert!(dump_mmp_sequence(&judged("shrunk")).contains("ff4d4d50"));

        // An abandoned claim, cleared; then without MMP, where nothing is released.
        drop(how(&|_| {}).unwrap());
        assert!(how(&|_| {}).is_err());
        let most_wait = Duration::ZERO;
        let cleared =
            MmpClaimOptions { now: NOW, random: 3, node: "", wait: &|_| {}, max_wait: most_wait };
        draconis_ext::clear_mmp(&disk, &cleared).unwrap();
        let (_, mine) = how(&|_| {}).unwrap();
        tune(&disk, &words(&["^mmp"]), NOW).unwrap();
        mine.unwrap().release(NOW).unwrap();
        judged("without");
        assert!(draconis_ext::clear_mmp(&disk, &cleared).is_err());
    }
}
