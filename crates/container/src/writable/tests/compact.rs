//! Compaction of image files.

use super::*;

/// Returns the file, truncated to `len`.
fn truncated(file: &GrowingDisk, len: u64) -> Vec<u8> {
    let mut bytes = file.bytes();
    bytes.truncate(len as usize);
    bytes
}

/// Returns the length of the image that `qemu-img convert` makes of the last checked one.
fn converted_len(dir: &Path, options: &[&str]) -> u64 {
    let (from, to) = (dir.join("judged"), dir.join("converted"));
    let shown = [from.to_str().unwrap(), to.to_str().unwrap()];
    let words = [&["convert", "-f", "qcow2", "-O", "qcow2"], options, &shown].concat();
    run_command_ok("qemu-img", &words).unwrap();
    std::fs::metadata(to).unwrap().len()
}

#[test]
#[ignore = "tools: qemu-img"]
fn compacted_qcow2_has_minimal_length() {
    let dir = tempfile::tempdir().unwrap();
    let shapes: [&[&str]; 6] = [
        &[],
        &["-o", "compat=0.10"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=512,refcount_bits=1"],
        &["-o", "cluster_size=4k,refcount_bits=4,lazy_refcounts=on"],
        &["-o", "cluster_size=4k,refcount_bits=64,compat=1.1"],
    ];
    let commands = ["write -P 7 20M 4M", "write -z 9M 1M", "write -P 8 100k 300k"];
    let len = 24 * MIB;
    for options in shapes {
        let Some(image) = create_image(dir.path(), options, "24M", &commands) else { return };
        let mut file = Arc::new(GrowingDisk::new(image, 96 * MIB));
        let mut random = Random::new(9);
        let unused = [12 * MIB + 700..len, 5 * MIB..6 * MIB, 0..0];
        for (round, unused) in unused.into_iter().enumerate() {
            let what = format!("{options:?}, {round}");
            let OpenedImage { disk, session: image, .. } =
                open_for_writing(file.clone(), &[], 7).unwrap();
            for _ in 0..60 {
                let count = 1 + random.next_below(400);
                let at = random.next_below(len / 512 - count) * 512;
                submit_write(&*disk, at, &vec![round as u8 + 1; (count * 512) as usize]);
            }
            let before = read_all(&*disk).unwrap();
            let shorter = image.as_ref().unwrap().compact(vec![unused.clone()]).unwrap().unwrap();
            let expected = read_all(&*disk).unwrap();
            let unused = unused.start as usize..unused.end as usize;
            let (mut ours, mut theirs) = (expected.clone(), before);
            assert!(ours[unused.clone()].iter().filter(|byte| **byte != 0).count() < 1 << 17);
            ours[unused.clone()].fill(0);
            theirs[unused.clone()].fill(0);
            assert!(ours == theirs, "{what}");
            let bytes = truncated(&file, shorter);
            check_image(dir.path(), &bytes, Some(&expected), false, &what);
            let least = converted_len(dir.path(), options);
            let most = least + least / 50 + (4 << 16);
            assert!(shorter <= most, "{what}: {shorter} bytes, converted {least}");
            // Writes continue in the file that was not truncated.
            submit_write(&*disk, 3 * MIB, &[99; 70_000 / 512 * 512]);
            submit_write(&*disk, 22 * MIB, &[98; 512]);
            let expected = read_all(&*disk).unwrap();
            drop((disk, image));
            check_image(dir.path(), &file.bytes(), Some(&expected), false, &format!("{what}, on"));
            file = Arc::new(GrowingDisk::new(file.bytes(), 96 * MIB));
        }
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn compacted_vhdx_has_only_used_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["-f", "vhdx", "-o", "block_size=1M"];
    let commands = ["write -P 7 20M 4M", "write -P 8 100k 300k"];
    let Some(image) = create_image(dir.path(), &options, "40M", &commands) else { return };
    let before = image.len() as u64;
    let file = Arc::new(GrowingDisk::new(image, 96 * MIB));
    let OpenedImage { disk, session: image, .. } = open_for_writing(file.clone(), &[], 7).unwrap();
    submit_write(&*disk, 30 * MIB, &vec![9; 8 << 20]);
    submit_write(&*disk, 3 * MIB, &vec![3; 2 << 20]);
    submit_write(&*disk, 7 * MIB, &vec![0; 3 << 20]);
    let mut expected = read_all(&*disk).unwrap();
    let unused = vec![36 * MIB..40 * MIB, 21 * MIB + 512..36 * MIB];
    let shorter = image.as_ref().unwrap().compact(unused).unwrap().unwrap();
    expected[22 << 20..].fill(0);
    assert!(read_all(&*disk).unwrap() == expected);
    drop((disk, image));
    // Tables and log take 4 MiB; of five blocks three are left, and two are new.
    assert!(shorter == 9 * MIB && shorter < before, "{shorter} of {before}");
    check_image(dir.path(), &truncated(&file, shorter), Some(&expected), false, "cut");
    let fixed = ["-f", "vhdx", "-o", "subformat=fixed,block_state_zero=off"];
    let image = create_image(dir.path(), &fixed, "8M", &[]).unwrap();
    let opened = open_for_writing(Arc::new(GrowingDisk::new(image, 32 * MIB)), &[], 7).unwrap();
    let compacted = opened.session.unwrap().compact(vec![0..MIB, 2 * MIB..8 * MIB]).unwrap();
    assert_eq!(compacted, None, "all blocks of a fixed one stay");
}

#[test]
#[ignore = "tools: qemu-img"]
fn compaction_keeps_snapshots_and_compressed_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let commands = [
        "write -P 7 3M 1M",
        "write -c -P 8 2M 1M",
        "snapshot one",
        "write -P 9 3200k 64k",
        "write -P 10 0 1M",
    ];
    let shapes: [&[&str]; 3] =
        [&[], &["-o", "compat=0.10"], &["-o", "cluster_size=512,refcount_bits=32"]];
    for options in shapes {
        let Some(image) = create_image(dir.path(), options, "5M", &commands) else { return };
        let kept = read_snapshot(dir.path(), "made", "one");
        let file = Arc::new(GrowingDisk::new(image, 32 * MIB));
        let OpenedImage { disk, session: image, .. } =
            open_for_writing(file.clone(), &[], 7).unwrap();
        submit_write(&*disk, 4 * MIB, &[3; 1 << 19]);
        submit_write(&*disk, MIB, &[4; 1 << 19]);
        let mut expected = read_all(&*disk).unwrap();
        let shorter =
            image.as_ref().unwrap().compact(vec![0..0, 4 * MIB..5 * MIB]).unwrap().unwrap();
        expected[4 << 20..].fill(0);
        assert!(read_all(&*disk).unwrap() == expected, "{options:?}");
        drop((disk, image));
        check_image(
            dir.path(),
            &truncated(&file, shorter),
            Some(&expected),
            false,
            &format!("{options:?}"),
        );
        assert!(read_snapshot(dir.path(), "judged", "one") == kept, "{options:?}");
        let path = dir.path().join("judged");
        run_command_ok("qemu-img", &["snapshot", "-a", "one", path.to_str().unwrap()]).unwrap();
        let image = std::fs::read(path).unwrap();
        check_image(dir.path(), &image, Some(&kept), false, "the snapshot, by others");
    }
}

/// Refcount blocks after what they count, and a refcount table that has grown, move, too.
/// The clusters of a snapshot have other counts than the rest.
#[test]
#[ignore = "tools: qemu-img"]
fn compaction_moves_refcount_blocks_and_table() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = ["write -P 6 0 1M", "snapshot one"];
    let cases: [(&str, &[&str], u64, u64, u64); 2] =
        [("512", &[], 5, 3 * MIB / 2, 400 << 10), ("4k", &snapshot, 8, 4 * MIB, 64 << 10)];
    for (cluster_size, commands, written, least, step) in cases {
        let options = ["-o", &format!("refcount_bits=64,cluster_size={cluster_size}")];
        let Some(image) = create_image(dir.path(), &options, "12M", commands) else { return };
        let full = Arc::new(GrowingDisk::new(image, 32 * MIB));
        let disk = open_for_writing(full.clone(), &[], 7).unwrap().disk;
        for at in (if commands.is_empty() { 0 } else { MIB }..written * MIB).step_by(1 << 16) {
            submit_write(&*disk, at, &[6; 1 << 16]);
        }
        drop(disk);
        let full = full.bytes();
        for kept in (0..8).map(|nth| least + nth * step) {
            let what = format!("{cluster_size}: {kept}");
            let file = Arc::new(GrowingDisk::new(full.clone(), 32 * MIB));
            let OpenedImage { disk, session: image, .. } =
                open_for_writing(file.clone(), &[], 7).unwrap();
            let unused = kept..12 * MIB;
            let shorter = image.unwrap().compact(vec![unused]).unwrap().unwrap();
            let mut expected = vec![0; 12 << 20];
            expected[..kept as usize].fill(6);
            assert!(read_all(&*disk).unwrap() == expected, "{what}");
            drop(disk);
            check_image(dir.path(), &truncated(&file, shorter), Some(&expected), false, &what);
            // A refcount block and an L2 table count 64 clusters at least.
            let most = kept + kept / 32 + (32 << 10);
            assert!(shorter <= most, "{what}: {shorter} of {most}");
        }
    }
}

/// What was changed is compressed again, and compressed clusters move.
#[test]
#[ignore = "tools: qemu-img"]
fn compaction_keeps_compressed_images_short() {
    let dir = tempfile::tempdir().unwrap();
    let shapes: [&[&str]; 6] = [
        &[],
        &["-o", "compression_type=zstd"],
        &["-o", "compat=0.10"],
        &["-o", "cluster_size=4k"],
        &["-o", "cluster_size=512,refcount_bits=1"],
        &["-o", "cluster_size=2M,refcount_bits=8"],
    ];
    let mut random = Random::new(4);
    let text: Vec<u8> = (0..6 << 20).map(|_| b"storage "[random.next_below(8) as usize]).collect();
    let source = dir.path().join("text");
    for options in shapes {
        std::fs::write(&source, [&text[..], &[0; 6 << 20]].concat()).unwrap();
        let made = dir.path().join("made");
        let words = [&["convert", "-c", "-f", "raw", "-O", "qcow2"], options];
        let words = [&words.concat()[..], &[source.to_str().unwrap(), made.to_str().unwrap()]];
        if run_command_ok("qemu-img", &words.concat()).is_none() {
            return;
        }
        let image = std::fs::read(&made).unwrap();
        let len = image.len() as u64;
        let mut file = Arc::new(GrowingDisk::new(image, 64 * MIB));
        for round in 0..3 {
            let what = format!("{options:?}, {round}");
            let OpenedImage { disk, session: image, .. } =
                open_for_writing(file.clone(), &[], 7).unwrap();
            // Blocks from the end of the disk to its front, as a shrink moves them.
            for _ in 0..40 {
                let at = random.next_below(4 << 20) / 4096 * 4096;
                let from = random.next_below(5 << 20) as usize;
                submit_write(&*disk, at, &text[from..from + 4096]);
            }
            let unused = 4 * MIB..5 * MIB;
            let mut expected = read_all(&*disk).unwrap();
            let shorter = image.as_ref().unwrap().compact(vec![unused.clone()]).unwrap().unwrap();
            let left = read_all(&*disk).unwrap();
            let unused = unused.start as usize..unused.end as usize;
            expected[unused.clone()].copy_from_slice(&left[unused]);
            assert!(left == expected, "{what}");
            drop((disk, image));
            let bytes = truncated(&file, shorter);
            check_image(dir.path(), &bytes, Some(&expected), false, &what);
            // What is packed in another way than by qemu-img can take a little more.
            assert!(shorter <= len + len / 50, "{what}: {shorter} bytes of {len}");
            file = Arc::new(GrowingDisk::new(bytes, 64 * MIB));
        }
    }
}

/// Discarded ranges never expose the backing file.
#[test]
#[ignore = "tools: qemu-img"]
fn compaction_over_backing_file_keeps_or_zeroes_unused() {
    let dir = tempfile::tempdir().unwrap();
    let below = dir.path().join("below");
    std::fs::write(&below, vec![6; 4 << 20]).unwrap();
    for compat in ["compat=1.1", "compat=0.10"] {
        let options = ["-o", compat, "-F", "raw", "-b", below.to_str().unwrap()];
        let commands = ["write -P 7 1M 3M", "write -P 8 0 64k"];
        let Some(image) = create_image(dir.path(), &options, "4M", &commands) else { return };
        let len = image.len();
        let file = Arc::new(GrowingDisk::new(image, 16 * MIB));
        let behind = [memory_disk(vec![6; 4 << 20])];
        let OpenedImage { disk, session: image, .. } =
            open_for_writing(file.clone(), &behind, 7).unwrap();
        let mut expected = read_all(&*disk).unwrap();
        let shorter = image
            .as_ref()
            .unwrap()
            .compact(vec![2 * MIB..3 * MIB, 3 * MIB..4 * MIB])
            .unwrap()
            .unwrap();
        if compat == "compat=1.1" {
            expected[2 << 20..].fill(0);
            assert!(shorter < len as u64 - MIB);
        }
        assert!(read_all(&*disk).unwrap() == expected, "{compat}");
        drop((disk, image));
        check_image(dir.path(), &truncated(&file, shorter), Some(&expected), false, compat);
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn power_cut_during_compaction_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&[&str], bool); 9] = [
        (&["-f", "vhdx", "-o", "block_size=1M"], false),
        (&[], false),
        (&["-o", "cluster_size=512"], false),
        (&["-o", "cluster_size=4k,compat=0.10"], false),
        (&["-o", "cluster_size=512,refcount_bits=64,lazy_refcounts=on"], false),
        (&["-o", "cluster_size=64k"], true),
        (&["-o", "cluster_size=4k,compat=0.10"], true),
        (&["-o", "cluster_size=4k,compression_type=zstd"], true),
        (&["-o", "cluster_size=512,refcount_bits=1"], true),
    ];
    for (options, is_compressed) in cases {
        let commands = ["write -P 5 1M 64k", "write -P 6 8M 300k", "snapshot one"];
        let packed = (0..64).map(|nth| format!("write -c -P {nth} {}k 64k", nth * 64));
        let packed: Vec<String> = packed.collect();
        let packed: Vec<&str> = packed.iter().map(String::as_str).collect();
        let commands = match (is_compressed, options) {
            (true, _) => &packed[..],
            (false, []) => &commands,
            (false, _) => &commands[..2],
        };
        let Some(image) = create_image(dir.path(), options, "9M", commands) else { return };
        let len = image.len().next_multiple_of(512) as u64;
        let growing = Arc::new(GrowingDisk::new(image, len + 16 * MIB));
        let disk = open_for_writing(growing.clone(), &[], 7).unwrap().disk;
        submit_write(&*disk, 2 * MIB, &[9; 6 << 20]);
        submit_write(&*disk, 0, &vec![8; if options.is_empty() { 1 << 20 } else { 300 << 10 }]);
        drop(disk);
        let start = read_disk_bytes(&*growing);
        let file =
            Arc::new(RecordDisk::new(GrowingDisk::new(growing.bytes(), growing.max_len_bytes())));
        let opened = open_for_writing(file.clone(), &[], 7).unwrap();
        if is_compressed {
            // Compressed again, where the crash states begin.
            submit_write(&*opened.disk, 20 << 10, &[3; 100 << 10]);
            submit_write(&*opened.disk, 1 << 20, &[4; 4096]);
            let last = opened.disk.submit(Group { writes: vec![] }, &[]).unwrap();
            opened.disk.wait_durable(last).unwrap();
        }
        let before = read_all(&*opened.disk).unwrap();
        let start = if is_compressed { read_disk_bytes(&*file) } else { start };
        file.take_events();
        let unused = 2 * MIB + 4096..9 * MIB;
        opened.session.as_ref().unwrap().compact(vec![unused.clone()]).unwrap();
        drop(opened);
        // Few groups pack much. DRACONIS_STATES=all looks at each state.
        let (subsets, step) = match (is_compressed, std::env::var_os("DRACONIS_STATES")) {
            (true, None) => (24, 4),
            (false, None) => (4, 28),
            (true, Some(_)) => (24, 1),
            (false, Some(_)) => (4, 1),
        };
        let few = CrashOptions { subsets, exhaustive_sectors: 2, ..CrashOptions::default() };
        let mut states = 0;
        for crash in CrashStates::new(start, file.take_events(), few) {
            states += 1;
            if (states - 1) % step != 0 {
                continue;
            }
            let what = format!("{options:?}: state {states}, {:?}", crash.kind);
            let opened = open(crash.disk.clone(), &[]);
            let found = read_all(&*opened.unwrap_or_else(|error| panic!("{what}: {error}")).disk);
            let found = found.unwrap();
            let used = ..unused.start as usize;
            assert!(found[used] == before[used], "{what}");
            if (states - 1) / step % 7 != 0 {
                continue;
            }
            check_image(dir.path(), &read_disk_bytes(&*crash.disk), Some(&found), true, &what);
            if options.is_empty() {
                let kept = read_snapshot(dir.path(), "judged", "one");
                assert!(kept[..1 << 20].iter().all(|byte| *byte == 0), "{what}");
            }
            let again =
                Arc::new(GrowingDisk::new(read_disk_bytes(&*crash.disk), growing.max_len_bytes()));
            let next = open_for_writing(again.clone(), &[], 7);
            let next = next.unwrap_or_else(|error| panic!("{what}: {error}"));
            let shorter =
                next.session.as_ref().unwrap().compact(vec![unused.clone()]).unwrap().unwrap();
            let found = read_all(&*next.disk).unwrap();
            assert!(found[used] == before[used], "{what}, again");
            drop(next);
            check_image(dir.path(), &truncated(&again, shorter), Some(&found), false, &what);
            assert!(shorter < growing.bytes().len() as u64, "{what}: {shorter}");
        }
        assert!(states > 30, "{options:?}: {states}");
    }
}
