//! Exports with TLS: to QEMU and libnbd, with right, wrong and no certificates.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::export::{Export, make_volume, succeed, text};
use crate::common::volume::run_e2fsck;
use crate::common::{Draconis, has_tool};

/// Makes an authority, and certificates of a server and a client below the directory, as qemu-nbd
/// and libnbd expect them.
fn make_certificates(dir: &Path) {
    std::fs::create_dir_all(dir).unwrap();
    let openssl = |line: &str| {
        let mut command = Command::new("openssl");
        succeed(command.args(line.split(' ')).current_dir(dir).stderr(Stdio::null()));
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!(
        "req -x509 {key} -keyout ca-key.pem -out ca-cert.pem -days 2 -subj /CN=authority"
    ));
    for name in ["server", "client"] {
        openssl(&format!("req {key} -keyout {name}-key.pem -out {name}.csr -subj /CN=localhost"));
        std::fs::write(dir.join("names"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n").unwrap();
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
             -days 2 -extfile names -out {name}-cert.pem"
        ));
    }
}

#[test]
#[ignore = "tools: openssl"]
fn qemu_and_libnbd_use_tls() {
    for tool in ["openssl", "qemu-img", "qemu-io", "nbdcopy"] {
        if !has_tool("exports with TLS", tool) {
            return;
        }
    }
    let draconis = Draconis::new();
    let volume = make_volume(&draconis, "volume");
    let (right, wrong) = (draconis.path("right"), draconis.path("wrong"));
    make_certificates(&right);
    make_certificates(&wrong);
    let disk = draconis.path("disk");
    std::fs::write(&disk, vec![0; 32 << 20]).unwrap();
    let line = ["--nbd", "tcp:127.0.0.1:0", "--tls", text(&right), text(&disk)];
    let export = Export::start(draconis.command(), &line);
    assert!(export.uri().starts_with("nbds://127.0.0.1:"));
    let port = export.uri().trim_end_matches('/').rsplit(':').next().unwrap().to_owned();
    let image = |tls: &str| format!("driver=nbd,host=localhost,port={port}{tls}");
    let credentials =
        |dir: &Path| format!("tls-creds-x509,id=tls,endpoint=client,dir={}", dir.display());
    let qemu = |tool: &str, dir: &Path, more: &[&str]| {
        let mut command = Command::new(tool);
        let (first, rest) = if tool == "qemu-img" { more.split_at(1) } else { more.split_at(0) };
        command.args(first).args(["--object", &credentials(dir), "--image-opts"]).args(rest);
        command
    };
    // To the export by QEMU, from it by libnbd with several connections, and compared by QEMU.
    let target = image(",tls-creds=tls");
    let opts = format!("driver=raw,file.driver=file,file.filename={}", text(&volume));
    succeed(&mut qemu(
        "qemu-img",
        &right,
        &["convert", "-n", "--target-image-opts", &opts, &target],
    ));
    let uri = format!("nbds://localhost:{port}/?tls-certificates={}", right.display());
    let copy = draconis.path("copy");
    succeed(Command::new("nbdcopy").args(["--connections=4", &uri, text(&copy)]));
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(&volume).unwrap());
    run_e2fsck(&copy);
    succeed(&mut qemu("qemu-img", &right, &["compare", &opts, &target]));
    let script = [
        "-c",
        "aio_write -P 1 1M 8M",
        "-c",
        "aio_write -P 2 9M 8M",
        "-c",
        "aio_read 20M 8M",
        "-c",
        "aio_flush",
        "-c",
        "read -P 1 1M 8M",
        "-c",
        "read -P 2 9M 8M",
        "-c",
        "flush",
        &target,
    ];
    let printed = succeed(&mut qemu("qemu-io", &right, &script)).stdout;
    let printed = String::from_utf8(printed).unwrap();
    assert!(!printed.contains("failed"), "{printed}");
    // An authority that is not the server's, and no TLS at all.
    let fails = |command: &mut Command| {
        let output = command.stderr(Stdio::null()).output().unwrap();
        assert!(!output.status.success(), "{command:?}");
    };
    fails(&mut qemu("qemu-img", &wrong, &["info", &target]));
    fails(&mut qemu("qemu-img", &right, &["info", &image("")]));
    // The certificate of the server's authority, but of a client of another.
    for name in ["client-cert.pem", "client-key.pem"] {
        std::fs::copy(wrong.join(name), right.join(name)).unwrap();
    }
    fails(&mut qemu("qemu-img", &right, &["info", &target]));
    fails(Command::new("nbdcopy").args([&format!("nbd://localhost:{port}/"), text(&copy)]));
    export.end();
}

#[test]
#[ignore = "tools: openssl"]
fn plain_text_is_refused() {
    if !has_tool("exports with TLS", "openssl") {
        return;
    }
    let draconis = Draconis::new();
    let certificates = draconis.path("certificates");
    make_certificates(&certificates);
    let disk = draconis.path("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let export = Export::at(&draconis, "sock", &["--tls", text(&certificates), text(&disk)]);
    let connect = || {
        let mut stream = UnixStream::connect(draconis.path("sock")).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(&[0, 0, 0, 3]).unwrap();
        stream
    };
    let mut client = connect();
    let mut call = |option: u8| {
        client.write_all(b"IHAVEOPT\0\0\0").unwrap();
        client.write_all(&[option, 0, 0, 0, 0]).unwrap();
        let mut head = [0; 20];
        client.read_exact(&mut head).unwrap();
        let mut text = vec![0; usize::from(head[19])];
        client.read_exact(&mut text).unwrap();
        u32::from_be_bytes(head[12..16].try_into().unwrap())
    };
    for option in [3, 8, 11, 77] {
        assert_eq!(call(option), 0x8000_0005);
    }
    assert_eq!(call(5), 1);
    client.write_all(&[7; 4096]).unwrap();
    // An alert, or nothing; then the end.
    let _ = client.read_to_end(&mut vec![]);
    // What comes with STARTTLS would be read as if it were encrypted.
    let mut client = connect();
    client.write_all(b"IHAVEOPT\0\0\0\x05\0\0\0\0IHAVEOPT\0\0\0\x03\0\0\0\0").unwrap();
    client.read_exact(&mut [0; 20]).unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_or(0), 0);
    // EXPORT_NAME has no error.
    let mut client = connect();
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_or(0), 0);
    export.end();
    std::fs::remove_file(certificates.join("server-key.pem")).unwrap();
    let address = format!("unix:{}", draconis.path("other").display());
    let line = ["export", "--nbd", &address, "--tls", text(&certificates), text(&disk)];
    let errors = draconis.run_failing(line);
    assert!(errors.contains("server-key.pem"), "{errors}");
}
