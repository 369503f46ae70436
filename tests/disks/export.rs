//! Images exported to NBD clients of others: libnbd's and QEMU's.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::bucket::TestBucket;
use crate::common::export::{
    Export, assert_contents, check_image, make_qcow2, make_store, make_volume, nbdcopy, nbdsh,
    succeed, text,
};
use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_tool, wait_until};

#[test]
fn command_lines_are_checked() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    let image = text(&image);
    let socket = format!("unix:{}", draconis.path("a.sock").display());
    std::fs::write(image, vec![0; 1 << 20]).unwrap();
    let errors = draconis.run_failing(["export", image]);
    assert!(errors.contains("unix:PATH") && errors.contains("tcp:HOST:PORT"), "{errors}");
    let errors = draconis.run_failing(["export", "--nbd", &socket, image, image]);
    assert!(errors.contains("another image has the name a.img"), "{errors}");
    let errors = draconis.run_failing(["export", "--nbd", &socket, "--name", "x", image, "b.img"]);
    assert!(errors.contains("--name"), "{errors}");
    let errors = draconis.run_failing(["export", "--nbd", &socket, "--partition", "1", image]);
    assert!(errors.contains("a.img"), "{errors}");
    std::fs::write(image, vec![0; 1300]).unwrap();
    for door in ["--nbd", "--vhost-user"] {
        let at = socket.trim_start_matches(if door == "--nbd" { "" } else { "unix:" });
        let output = draconis.run(["export", door, at, "--run", "true", image]);
        let notes = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && notes.contains("last 276 bytes"), "{notes}");
    }
    assert_eq!(draconis.run_ok(["export", "-r", "--run", "true", image]), "");
    assert_eq!(draconis.run(["export", "--nbd", "/a", image]).status.code(), Some(2));
    assert_eq!(draconis.run(["export", "--nbd", &socket]).status.code(), Some(2));
}

#[test]
fn run_ends_with_the_status_of_its_command() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let socket = draconis.path("a.sock");
    let address = format!("unix:{}", socket.display());
    let run = |command: &str| {
        let line = ["export", "--nbd", &address, "--name", "vm", "--run", command, text(&image)];
        draconis.run(line)
    };
    // Each one replaces the socket that the one before left.
    let output = run("echo $uri $unixsocket; exit 7");
    assert_eq!(output.status.code(), Some(7));
    let socket = text(&socket);
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!(told, format!("nbd+unix:///vm?socket={socket} {socket}\n"));
    assert_eq!(run("kill -9 $$").status.code(), Some(128 + 9));
    assert_eq!(run("true").status.code(), Some(0));
    // Without an address the socket is a private one; the name has its variable, as a port has.
    let line = ["export", "--run", "test -S $unixsocket && echo $exportname.$port", text(&image)];
    assert_eq!(draconis.run_ok([&line[..], &["--name", "vm"]].concat()), "vm.\n");
    let line = ["export", "--nbd", "tcp:127.0.0.1:0", "--run", "echo $unixsocket$port"];
    let told = draconis.run_ok([&line[..], &[text(&image)]].concat());
    assert!(told.trim().parse::<u16>().is_ok(), "{told}");
    // SIGINT is for the command; SIGTERM ends the export, which then has not succeeded.
    assert_eq!(run("kill -INT $PPID; exit 5").status.code(), Some(5));
    assert_eq!(run("kill -TERM $PPID; sleep 0.2; exit 5").status.code(), Some(128 + 15));
}

#[test]
#[ignore = "tools: nbdcopy"]
fn images_of_every_kind_are_exported() {
    if !has_tool("exports", "nbdcopy") || !has_tool("exports", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let raw = make_volume(&draconis, "raw");
    for kind in ["qcow2", "vhdx", "vmdk"] {
        let image = draconis.path(kind);
        let line = ["convert", "-f", "raw", "-O", kind, text(&raw), text(&image)];
        succeed(Command::new("qemu-img").args(line));
    }
    let packed = std::fs::File::create(draconis.path("raw.gz")).unwrap();
    succeed(Command::new("gzip").arg("-c").arg(&raw).stdout(packed));
    let disk = make_store(&draconis);
    let export = Export::at(&draconis, "sock", &[&disk]);
    nbdcopy(&[text(&raw), export.uri()]);
    export.end();
    draconis.run_ok(["store", "snapshot", &disk, "first"]);
    let snapshot = format!("{disk}@first");
    let path = |name: &str| text(&draconis.path(name)).to_owned();
    for (image, is_read_only) in [
        (path("raw"), false),
        (path("qcow2"), false),
        (path("vhdx"), false),
        (path("vmdk"), true),
        (path("raw.gz"), true),
        (disk.clone(), false),
        (snapshot.clone(), true),
    ] {
        for more in [&[][..], &["--read-only"]] {
            let export = Export::at(&draconis, "sock", &[more, &[&image]].concat());
            let about = &export.about["exports"][0];
            assert_eq!(about["read_only"], is_read_only || !more.is_empty(), "{image}");
            assert_eq!(about["size_bytes"], 32 << 20, "{image}");
            assert_contents(&draconis, export.uri(), &raw);
            export.end();
        }
    }
    // Several at once, two of them in one store.
    let export = Export::at(&draconis, "sock", &[&path("qcow2"), &disk, &snapshot]);
    for nth in 0..3 {
        let uri = export.about["exports"][nth]["uris"][0].as_str().unwrap().to_owned();
        assert_contents(&draconis, &uri, &raw);
    }
    let names: Vec<_> = (0..3).map(|nth| export.about["exports"][nth]["name"].clone()).collect();
    assert_eq!(names, ["qcow2", "vol", "vol@first"]);
    export.end();
}

#[test]
#[ignore = "tools: nbdcopy"]
fn raw_bytes_of_a_qcow2_file() {
    if !has_tool("raw exports", "nbdcopy") || !has_tool("raw exports", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let qcow2 = make_qcow2(&draconis, "qcow2");
    let bytes = std::fs::read(&qcow2).unwrap();
    for more in [&[][..], &["-r"]] {
        let line = [&["--format", "raw", text(&qcow2)], more].concat();
        let export = Export::at(&draconis, "sock", &line);
        // Disks have whole sectors.
        let size = bytes.len().next_multiple_of(512);
        assert_eq!(export.about["exports"][0]["size_bytes"], size);
        let copy = draconis.path("copy");
        nbdcopy(&[export.uri(), text(&copy)]);
        assert!(std::fs::read(&copy).unwrap()[..bytes.len()] == bytes);
        export.end();
    }
}

#[test]
#[ignore = "tools: nbdcopy"]
fn partition_is_exported() {
    if !has_tool("exports", "nbdcopy") || !has_tool("exports of a partition", "sfdisk") {
        return;
    }
    let draconis = Draconis::new();
    let volume = make_volume(&draconis, "volume");
    let disk = draconis.path("disk");
    let bytes = std::fs::read(&volume).unwrap();
    std::fs::write(&disk, [&vec![0; 1 << 20], &bytes[..], &vec![0; 1 << 20]].concat()).unwrap();
    let mut table = Command::new("sfdisk").args(["-q", text(&disk)]).stdin(Stdio::piped()).spawn();
    let table = table.as_mut().unwrap();
    table.stdin.take().unwrap().write_all(b"label: gpt\n2048 32M\n").unwrap();
    assert!(table.wait().unwrap().success());
    let export = Export::at(&draconis, "sock", &["--partition", "1", text(&disk)]);
    assert_contents(&draconis, export.uri(), &volume);
    export.end();
}

#[test]
#[ignore = "tools: nbdinfo"]
fn holes_stay_holes() {
    use std::os::unix::fs::MetadataExt;
    if !has_tool("holes of exports", "nbdinfo") || !has_tool("holes of exports", "nbdcopy") {
        return;
    }
    let draconis = Draconis::new();
    let (from, to) = (draconis.path("from"), draconis.path("to"));
    std::fs::File::create(&from).unwrap().set_len(64 << 20).unwrap();
    let file = std::fs::File::options().write(true).open(&from).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 65536], 8 << 20).unwrap();
    file.sync_all().unwrap();
    std::fs::File::create(&to).unwrap().set_len(64 << 20).unwrap();
    let export = Export::at(&draconis, "sock", &[text(&from), text(&to)]);
    let uri = |nth: usize| export.about["exports"][nth]["uris"][0].as_str().unwrap();
    let map = succeed(Command::new("nbdinfo").args(["--map", "--json", uri(0)])).stdout;
    let map: serde_json::Value = serde_json::from_slice(&map).unwrap();
    let of = |nth: usize| (map[nth]["offset"].as_u64(), map[nth]["type"].as_u64());
    assert_eq!([of(0), of(1)], [(Some(0), Some(3)), (Some(8 << 20), Some(0))]);
    let last = map.as_array().unwrap().last().unwrap();
    assert_eq!(last["type"], 3);
    nbdcopy(&[uri(0), uri(1)]);
    let socket_uri = uri(1).to_owned();
    let map = succeed(Command::new("nbdinfo").args(["--map=base:allocation", &socket_uri])).stdout;
    assert!(String::from_utf8(map).unwrap().contains("hole"));
    export.end();
    assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
    assert!(std::fs::metadata(&to).unwrap().blocks() * 512 < 1 << 20);
}

#[test]
#[ignore = "tools: nbdcopy"]
fn volumes_are_copied_both_ways() {
    if !has_tool("exports", "nbdcopy") || !has_tool("exports", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let volume = make_volume(&draconis, "volume");
    let raw = draconis.path("raw");
    let ways: [&[&str]; 3] =
        [&[], &["--connections=4", "--request-size=65536"], &["--synchronous", "--flush"]];
    for way in ways {
        std::fs::write(&raw, vec![7; 32 << 20]).unwrap();
        let _ = std::fs::remove_file(draconis.path("s"));
        let disk = make_store(&draconis);
        let qcow2 = make_qcow2(&draconis, "qcow2");
        for image in [text(&raw), text(&qcow2), &disk] {
            let export = Export::at(&draconis, "sock", &[image]);
            nbdcopy(&[way, &[text(&volume), export.uri()]].concat());
            assert_contents(&draconis, export.uri(), &volume);
            export.end();
            // What was written is there for the next export.
            let export = Export::at(&draconis, "sock", &["-r", image]);
            assert_contents(&draconis, export.uri(), &volume);
            export.end();
        }
        run_e2fsck(&raw);
        succeed(Command::new("qemu-img").args(["check", "-q", text(&qcow2)]));
        draconis.run_ok(["store", "check", text(&draconis.path("s"))]);
    }
}

#[test]
#[ignore = "tools: qemu-img"]
fn qemu_reads_and_writes() {
    if !has_tool("exports to QEMU", "qemu-img") || !has_tool("exports to QEMU", "qemu-io") {
        return;
    }
    let draconis = Draconis::new();
    let volume = make_volume(&draconis, "volume");
    let disk = make_store(&draconis);
    let qcow2 = make_qcow2(&draconis, "qcow2");
    for image in [&disk, text(&qcow2)] {
        let export = Export::at(&draconis, "sock", &[image]);
        let uri = export.uri();
        let convert = ["convert", "-n", "-f", "raw", "-O", "raw", text(&volume), uri];
        succeed(Command::new("qemu-img").args(convert));
        let compare = ["compare", "-f", "raw", "-F", "raw", text(&volume), uri];
        succeed(Command::new("qemu-img").args(compare));
        succeed(Command::new("qemu-img").args(["map", "-f", "raw", uri]));
        let mut io = Command::new("qemu-io");
        for command in [
            "write -P 7 4096 65536",
            "write -f -P 8 1000 777",
            "read -P 8 1000 777",
            "write -z -u 1M 1M",
            "read -P 0 1M 1M",
            "write -z 3M 100k",
            "discard 8M 1M",
            "aio_write -P 1 16M 1M",
            "aio_write -P 2 17M 1M",
            "aio_flush",
            "read -P 1 16M 1M",
            "read -P 2 17M 1M",
            "flush",
        ] {
            io.args(["-c", command]);
        }
        let printed = String::from_utf8(succeed(io.args(["-f", "raw", uri])).stdout).unwrap();
        assert!(!printed.contains("failed"), "{printed}");
        export.end();
    }
    succeed(Command::new("qemu-img").args(["check", "-q", text(&qcow2)]));
}

/// Every command and error, as libnbd sees them.
const NBDSH_SCRIPT: &str = r#"
import errno, os
h.add_meta_context("base:allocation")
h.connect_uri(os.environ["URI"])
h.set_strict_mode(0)
assert h.can_multi_conn() and h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero()
assert h.can_fast_zero() and h.can_cache() and h.can_df() and h.get_structured_replies_negotiated()
size = h.get_size()
h.pwrite(b"abc" * 1000, 511, nbd.CMD_FLAG_FUA)
assert h.pread(3000, 511) == b"abc" * 1000
assert h.pread_structured(3000, 511, lambda *_: 0, nbd.CMD_FLAG_DF) == b"abc" * 1000
h.zero(1000, 600)
assert h.pread(1000, 600) == bytes(1000)
h.zero(1 << 20, 1 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.trim(1 << 20, 2 << 20)
h.cache(1 << 20, 0)
h.flush()
extents = []
h.block_status(size, 0, lambda context, at, of, error: extents.append((context, of)))
context, of = extents[0]
assert context == "base:allocation" and sum(of[::2]) <= size and len(of) >= 2
h.block_status(1 << 20, 0, lambda *_: 0, nbd.CMD_FLAG_REQ_ONE)
cookies = [h.aio_pread(nbd.Buffer(4096), n * 4096) for n in range(64)]
while cookies:
    h.poll(-1)
    cookies = [cookie for cookie in cookies if not h.aio_command_completed(cookie)]
def fails(error, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as why:
        assert why.errnum == error, (why.errnum, error)
    else:
        assert False, "it succeeded"
fails(errno.EINVAL, h.pread, 2, size - 1)
fails(errno.ENOSPC, h.pwrite, b"ab", size - 1)
fails(errno.EINVAL, h.trim, 2, size - 1)
fails(errno.ENOTSUP, h.zero, 4096, 0, nbd.CMD_FLAG_FAST_ZERO)
fails(errno.EINVAL, h.pread, 33 << 20, 0)
h.shutdown()
"#;

#[test]
#[ignore = "tools: nbdsh"]
fn nbdsh_uses_every_command() {
    let Some(nbdsh) = nbdsh("every command of an export") else { return };
    let draconis = Draconis::new();
    let raw = draconis.path("raw");
    std::fs::write(&raw, vec![1; 64 << 20]).unwrap();
    let disk = make_store(&draconis);
    for image in [text(&raw), &disk] {
        let export = Export::at(&draconis, "sock", &[image]);
        let mut script = nbdsh();
        succeed(script.env("URI", export.uri()).args(["-c", NBDSH_SCRIPT]));
        export.end();
    }
    let export = Export::at(&draconis, "sock", &["-r", text(&raw)]);
    let script = "import errno\nh.set_strict_mode(0)\nassert h.is_read_only()\n\
        try:\n    h.pwrite(b'a', 0)\nexcept nbd.Error as why:\n    assert why.errnum == errno.EPERM\n\
        else:\n    assert False";
    succeed(nbdsh().args(["-u", export.uri(), "-c", script]));
}

#[test]
fn images_are_locked() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let shown = text(&image);
    let other = format!("unix:{}", draconis.path("other").display());
    let export = Export::at(&draconis, "sock", &[shown]);
    draconis.run_failing(["export", "--nbd", &other, shown]);
    draconis.run_failing(["export", "--nbd", &other, "-r", shown]);
    let errors = draconis.run_failing(["format", "--force", shown]);
    assert!(errors.contains("in use"), "{errors}");
    export.end();
    let _one = Export::at(&draconis, "sock", &["-r", shown]);
    let _two = Export::at(&draconis, "other", &["-r", shown]);
    draconis.run_failing(["export", "--nbd", &format!("{other}2"), shown]);
    // The socket of a running export is not replaced.
    let errors = draconis.run_failing(["export", "--nbd", &other, "-r", shown]);
    assert!(errors.contains("other"), "{errors}");
}

#[test]
fn once_ends_with_the_last_client_and_garbage_is_ignored() {
    let draconis = Draconis::new();
    let image = draconis.path("a.img");
    std::fs::write(&image, vec![5; 1 << 20]).unwrap();
    let arguments = ["--once", "--nbd", "tcp:127.0.0.1:0", text(&image)];
    let mut export = Export::start(draconis.command(), &arguments);
    let address = export.uri().strip_prefix("nbd://").unwrap().trim_end_matches('/').to_owned();
    let connect = || {
        let stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(draconis_testkit::wait::HANG_BOUND)).unwrap();
        stream
    };
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b""] {
        connect().write_all(garbage).unwrap();
    }
    let idle = connect();
    let mut client = connect();
    client.read_exact(&mut [0; 18]).unwrap();
    client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    // A read of 4 bytes at 8, then the client is gone.
    let request = b"\x25\x60\x95\x13\0\0\0\0cookie!!\0\0\0\0\0\0\0\x08\0\0\0\x04";
    client.write_all(request).unwrap();
    let mut reply = [0; 20];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply, *b"\x67\x44\x66\x98\0\0\0\0cookie!!\x05\x05\x05\x05");
    assert!(export.child.try_wait().unwrap().is_none());
    drop((client, idle));
    assert_eq!(export.child.wait().unwrap().code(), Some(0));
}

#[test]
#[ignore = "tools: qemu-img"]
fn sigterm_under_load_leaves_clean_images() {
    if !has_tool("ends of exports", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let qcow2 = make_qcow2(&draconis, "qcow2");
    for image in [text(&qcow2), &disk] {
        for round in 0..3 {
            let export = Export::at(&draconis, "sock", &[image]);
            let bench = ["bench", "-q", "-w", "-f", "raw", "-c", "10000000", "-d", "32"];
            let mut load = Command::new("qemu-img");
            load.args(bench).args(["-s", "8192", "-S", "40960", export.uri()]);
            let mut load = load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            draconis_testkit::wait::pause(
                "the end comes at any moment",
                Duration::from_millis(200 + 150 * round),
            );
            export.end();
            assert!(!load.wait().unwrap().success());
        }
    }
    succeed(Command::new("qemu-img").args(["check", "-q", text(&qcow2)]));
    draconis.run_ok(["store", "check", text(&draconis.path("s"))]);
}

#[test]
#[ignore = "tools: qemu-img"]
fn flushed_data_survive_sigkill() {
    let Some(shell) = nbdsh("killed exports") else { return };
    if !has_tool("killed exports", "qemu-img") {
        return;
    }
    let draconis = Draconis::new();
    let disk = make_store(&draconis);
    let qcow2 = make_qcow2(&draconis, "qcow2");
    // Writes through one connection, and flushes through another; then writes until it is killed.
    let script = "import os, random\nother = nbd.NBD()\nother.connect_uri(os.environ['URI'])\n\
        random.seed(int(os.environ['SEED']))\n\
        data = random.randbytes(1 << 20)\nh.pwrite(data, 3 << 20)\nh.pwrite(data[:999], 12345)\n\
        other.flush()\nprint('flushed', flush=True)\n\
        while True: h.pwrite(random.randbytes(65536), (8 << 20) + 65536 * random.randrange(300))";
    let check = "import os, random\nrandom.seed(int(os.environ['SEED']))\n\
        data = random.randbytes(1 << 20)\nassert h.pread(1 << 20, 3 << 20) == data\n\
        assert h.pread(999, 12345) == data[:999]";
    for image in [text(&qcow2), &disk] {
        for seed in 0..5 {
            let mut export = Export::at(&draconis, "sock", &[image]);
            let nbdsh = |uri: &str, script: &str| {
                let mut nbdsh = shell();
                nbdsh.args(["-u", uri, "-c", script]).env("URI", uri);
                nbdsh.env("SEED", seed.to_string()).stderr(Stdio::null());
                nbdsh
            };
            let mut client = nbdsh(export.uri(), script);
            let mut client = client.stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(client.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "flushed\n");
            draconis_testkit::wait::pause(
                "the kill comes at any moment",
                Duration::from_millis(seed * 10),
            );
            export.child.kill().unwrap();
            export.child.wait().unwrap();
            let _ = client.wait();
            let export = Export::at(&draconis, "sock", &[image]);
            succeed(&mut nbdsh(export.uri(), check));
            export.end();
        }
    }
    check_image(&draconis, text(&qcow2));
    draconis.run_ok(["store", "check", text(&draconis.path("s"))]);
}

#[test]
#[ignore = "tools: nbdcopy"]
fn disk_in_a_bucket_is_exported() {
    if !has_tool("exports from a bucket", "nbdcopy") {
        return;
    }
    let bucket = TestBucket::directory_bucket();
    let draconis = &bucket.draconis;
    let volume = make_volume(draconis, "volume");
    std::fs::create_dir_all(draconis.path("bucket")).unwrap();
    draconis.run_ok(["store", "create", &bucket.address, "--size", "192M"]);
    draconis.run_ok(["store", "disk", &bucket.address, "vol", "32M"]);
    let disk = format!("{}#vol", bucket.address);
    let export = Export::at(draconis, "sock", &[&disk]);
    nbdcopy(&["--flush", text(&volume), export.uri()]);
    export.end();
    let export = Export::at(draconis, "sock", &["-r", &disk]);
    assert_contents(draconis, export.uri(), &volume);
    let second = Export::at(draconis, "second", &["-r", &disk]);
    assert_contents(draconis, second.uri(), &volume);
}

/// The sandbox allows what an export needs when the disk is full: the client gets ENOSPC.
#[test]
#[ignore = "tools: nbdsh"]
fn full_store_is_no_space() {
    let Some(nbdsh) = nbdsh("a full store") else { return };
    let draconis = Draconis::new();
    let store = draconis.path("small");
    let store = text(&store);
    draconis.run_ok(["store", "create", store, "--size", "16M", "--layout", "cow", "--sparse"]);
    draconis.run_ok(["store", "disk", store, "vol", "64M"]);
    let export = Export::at(&draconis, "sock", &[&format!("{store}#vol")]);
    let script = "import errno, random\n\
        try:\n    for n in range(64): h.pwrite(random.randbytes(1 << 20), n << 20)\n\
        except nbd.Error as why:\n    assert why.errnum == errno.ENOSPC, why\n\
        else:\n    assert False\n\
        h.pread(1 << 20, 0)\nh.flush()";
    succeed(nbdsh().args(["-u", export.uri(), "-c", script]));
    let told = draconis.run_ok(["status"]);
    assert!(told.contains("error     it is full, and clients get ENOSPC"), "{told}");
    export.end();
    wait_until("the socket refuses", || {
        std::os::unix::net::UnixStream::connect(draconis.path("sock")).is_err()
    });
}
