//! Exports killed by SIGKILL while clients write: what was flushed is there, and clients that connect
//! again see no error. `DRACONIS_ROUNDS` is the number of kills of each image.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::export::{
    BlockWriter, Export, NbdFuse, SimpleClient, check_image, make_qcow2, make_store, rounds,
    succeed, text,
};
use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_tool, make_source_tree, wait_until};
use draconis_device::Random;

const CLIENTS: u64 = 3;

/// Creates a raw file, a qcow2 file, and disks in stores.
fn make_images(draconis: &Draconis) -> Vec<String> {
    let raw = draconis.path("raw");
    std::fs::File::create(&raw).unwrap().set_len(32 << 20).unwrap();
    let qcow2 = make_qcow2(draconis, "qcow2");
    let disk = make_store(draconis);
    draconis.run_ok(["store", "snapshot", &disk, "base"]);
    draconis.run_ok(["store", "clone", &format!("{disk}@base"), "clone"]);
    let clone = format!("{}#clone", draconis.path("s").display());
    vec![text(&raw).to_owned(), text(&qcow2).to_owned(), clone]
}

/// Kills an export, and checks its image.
fn kill(draconis: &Draconis, mut export: Export, image: &str) {
    export.child.kill().unwrap();
    export.child.wait().unwrap();
    check_image(draconis, image);
}

#[test]
#[ignore = "tools: nbdsh"]
fn flushed_writes_survive_kills() {
    let draconis = Draconis::new();
    let socket = draconis.path("sock");
    for image in make_images(&draconis) {
        let mut writers: Vec<_> = (0..CLIENTS).map(|nth| BlockWriter::new(nth, 1, 4096)).collect();
        for round in 0..rounds(4) {
            let export = Export::at(&draconis, "sock", &[&image]);
            let threads = writers.into_iter().map(|mut writer| {
                let mut client = SimpleClient::connect(&socket);
                std::thread::spawn(move || {
                    // Only the death of the export ends it.
                    assert_eq!(writer.write_until_failure(&mut client), None);
                    writer
                })
            });
            let threads: Vec<_> = threads.collect();
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                Duration::from_millis(100 + 37 * (round % 20)),
            );
            kill(&draconis, export, &image);
            writers = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            let export = Export::at(&draconis, "sock", &[&image]);
            let mut client = SimpleClient::connect(&socket);
            let what = format!("{image}, kill {round}");
            writers.iter_mut().for_each(|writer| writer.check(&mut client, &what));
            drop(client);
            export.end();
        }
        assert!(writers.iter().all(|writer| writer.writes > 0));
    }
}

/// A volume made and filled through the export, which is killed meanwhile.
#[test]
#[ignore = "tools: nbdfuse"]
fn journals_of_killed_exports_replay() {
    for tool in ["nbdfuse", "nbdcopy", "fusermount3", "e2fsck"] {
        if !has_tool("journals of killed exports", tool) {
            return;
        }
    }
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    make_source_tree(&tree);
    for nth in 0..200 {
        std::fs::write(tree.join(format!("more-{nth}")), vec![nth as u8; 20_000]).unwrap();
    }
    for image in make_images(&draconis) {
        for round in 0..rounds(2) {
            let export = Export::at(&draconis, "sock", &[&image]);
            let fuse = NbdFuse::mount(draconis.make_dir("fuse"), export.uri());
            let file = fuse.file();
            succeed(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", text(&file)]));
            let mut put = draconis.command();
            put.args(["put", "-r", text(&tree), &format!("{}:/", text(&file))]);
            let mut put = put.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                Duration::from_millis(20 + 61 * (round % 20)),
            );
            kill(&draconis, export, &image);
            let _ = put.wait();
            drop(fuse);
            let export = Export::at(&draconis, "sock", &["-r", &image]);
            let copy = draconis.path("copy");
            let _ = std::fs::remove_file(&copy);
            succeed(Command::new("nbdcopy").args([export.uri(), text(&copy)]));
            export.end();
            let replay = ["-fy", "-E", "journal_only", text(&copy)];
            succeed(Command::new("e2fsck").args(replay).stderr(Stdio::null()));
            run_e2fsck(&copy);
        }
    }
}

/// Starts and kills an export some times, or until `client` has ended.
fn kill_until_ended(draconis: &Draconis, image: &str, client: &mut Child) {
    for round in 0..2 * rounds(1) {
        let export = Export::at(draconis, "sock", &[image]);
        for _ in 0..15 + 3 * (round % 5) {
            if client.try_wait().unwrap().is_some() {
                return export.end();
            }
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                Duration::from_millis(20),
            );
        }
        kill(draconis, export, image);
    }
    let export = Export::at(draconis, "sock", &[image]);
    wait_until("the client ends", || client.try_wait().unwrap().is_some());
    export.end();
}

#[test]
#[ignore = "tools: qemu-io"]
fn clients_that_connect_again_see_no_error() {
    for tool in ["qemu-io", "nbdkit", "nbdcopy"] {
        if !has_tool("clients that connect again", tool) {
            return;
        }
    }
    let draconis = Draconis::new();
    let socket = draconis.path("sock");
    let source = draconis.path("source");
    let mut random = Random::new(5);
    let bytes: Vec<u8> = (0..4 << 20).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    std::fs::write(&source, &bytes).unwrap();
    for image in make_images(&draconis) {
        // The first connection finds an export.
        let export = Export::at(&draconis, "sock", &[&image]);
        let mut qemu = Command::new("qemu-io");
        let server = format!("server.type=unix,server.path={}", text(&socket));
        // Each write is durable when it is answered, so none is lost with the export.
        qemu.args(["--image-opts", "-t", "writethrough"]);
        qemu.arg(format!("driver=nbd,{server},reconnect-delay=60"));
        // The image has 32 MiB.
        let count = (60 * rounds(1)).min(160);
        for nth in 0..count {
            qemu.args(["-c", &format!("write -P {} {}k 192k", 1 + nth % 200, nth * 200)]);
            qemu.args(["-c", "sleep 20"]);
        }
        for nth in 0..count {
            qemu.args(["-c", &format!("read -P {} {}k 192k", 1 + nth % 200, nth * 200)]);
        }
        let output = std::fs::File::create(draconis.path("said")).unwrap();
        let mut client = qemu.stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap();
        draconis_testkit::wait::pause("the kill comes at any moment", Duration::from_millis(300));
        kill(&draconis, export, &image);
        kill_until_ended(&draconis, &image, &mut client);
        let message = std::fs::read_to_string(draconis.path("said")).unwrap();
        let is_good = client.wait().unwrap().success()
            && message.lines().filter(|line| line.contains("bytes at offset")).count()
                == 2 * count as usize
            && !message.contains("fail");
        assert!(is_good, "{image}: {message}");
        // nbdkit's retry filter opens its connection again and repeats what failed.
        let export = Export::at(&draconis, "sock", &[&image]);
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.args(["-U", "-", "--filter=retry", "nbd", &format!("socket={}", text(&socket))]);
        nbdkit.args(["retry=50", "retries=200", "retry-delay=1", "retry-exponential=no", "--run"]);
        nbdkit.arg(format!("nbdcopy --synchronous --flush {} $uri", text(&source)));
        let mut client = nbdkit.spawn().unwrap();
        draconis_testkit::wait::pause("the kill comes at any moment", Duration::from_millis(150));
        drop(export);
        kill_until_ended(&draconis, &image, &mut client);
        assert!(client.wait().unwrap().success(), "{image}");
    }
}
