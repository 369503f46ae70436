//! Shows that the kernel loses the requests of a ring whose server dies, which is why only mounts
//! that end with their worker use rings (decision 108). The test fails on a kernel that does not.
//!
//! ```text
//!   clients: stat in a loop ──▶ kernel ──▶ server 1: this program once more, killed after 30 ms
//!                                     └──▶ server 2, on the same connection, asks with RESEND
//! ```

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use super::RingSet;
use crate::fuse::decoder::{HEADER_BYTES, u32_at, u64_at};
use crate::fuse::init::InitRequest;
use crate::fuse::options::ServerOptions;
use crate::fuse::reply::Reply;
use crate::fuse::request::MAX_IO_BYTES;
use draconis_testkit::report_skipped;

const ENABLE_URING_FILE: &str = "/sys/module/fuse/parameters/enable_uring";
/// Set in a server: `ring` or `device`.
const SERVER_VARIABLE: &str = "DRACONIS_TEST_FUSE_SERVER";
const CLIENTS: usize = 2;
const MAX_DEATHS: u32 = 10;
/// A client whose call takes longer hangs.
const CALL_LIMIT: Duration = Duration::from_secs(5);

/// The kernel refuses to read requests into less.
const MAX_REQUEST_BYTES: usize = MAX_IO_BYTES + 4096;
/// `struct fuse_out_header`.
const HEADER_OUT_BYTES: u32 = 16;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const BATCH_FORGET: u32 = 42;

#[test]
fn kernel_loses_requests_of_a_ring_whose_server_dies() {
    if let Ok(transport) = std::env::var(SERVER_VARIABLE) {
        return serve(std::io::stdin().as_fd(), transport == "ring");
    }
    let enabled = std::fs::read_to_string(ENABLE_URING_FILE).is_ok_and(|it| it.starts_with('Y'));
    let is_root = rustix::process::geteuid().is_root();
    if !enabled || !is_root || !Path::new("/dev/fuse").exists() {
        return report_skipped(format!("lost requests: root, with Y in {ENABLE_URING_FILE}"));
    }
    assert_eq!(count_deaths_until_loss("device"), None, "the device file loses requests");
    let lost = count_deaths_until_loss("ring");
    assert!(
        lost.is_some(),
        "no request was lost in {MAX_DEATHS} deaths of a ring's server: this kernel seems to send \
         them again. Look at decision 108 again: mounts that restart their worker could \
         use rings"
    );
    eprintln!("requests of a ring are lost, as decision 108 says, after deaths: {lost:?}");
}

/// A connection without a server of its own, mounted. Its clients are released when it is dropped.
struct Connection {
    dir: PathBuf,
    fuse: OwnedFd,
}

impl Connection {
    fn mount(over_rings: bool) -> Self {
        let name = format!("draconis-ring-{}-{over_rings}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let fuse = rustix::fs::open("/dev/fuse", flags, Mode::empty()).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&fuse);
        let data = format!("fd={number},rootmode=40000,user_id=0,group_id=0");
        let data = std::ffi::CString::new(data).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount("ring", &dir, "fuse", flags, data.as_c_str()).unwrap();
        let connection = Self { dir, fuse };
        let mut request = vec![0; MAX_REQUEST_BYTES];
        let len = rustix::io::read(&connection.fuse, &mut request[..]).unwrap();
        let options = ServerOptions { over_rings, ..ServerOptions::default() };
        let init = InitRequest::parse(&request[HEADER_BYTES..len]).unwrap();
        let (body, agreed) = init.negotiate(options, false).unwrap();
        assert_eq!(agreed.over_rings, over_rings);
        write_reply(connection.fuse.as_fd(), &request, 0, body.as_bytes());
        connection
    }

    fn start_server(&self, transport: &str) -> Child {
        // The name of the test above.
        let name = "fuse::ring::lost_requests::kernel_loses_requests_of_a_ring_whose_server_dies";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture"]).env(SERVER_VARIABLE, transport);
        command.stdin(self.fuse.try_clone().unwrap()).stdout(Stdio::null());
        command.spawn().unwrap()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
        let unmounted = rustix::mount::unmount(&self.dir, flags);
        let removed = std::fs::remove_dir(&self.dir);
        if !std::thread::panicking() {
            unmounted.unwrap();
            removed.unwrap();
        }
    }
}

/// Kills servers until a client hangs or its call fails. Returns the number of deaths, `None` if
/// all clients went on after each of `MAX_DEATHS`.
fn count_deaths_until_loss(transport: &str) -> Option<u32> {
    let connection = Connection::mount(transport == "ring");
    let counts: [AtomicU64; CLIENTS + 1] = Default::default();
    let stopped = AtomicBool::new(false);
    let dir = connection.dir.clone();
    let call = |count: &AtomicU64| {
        while !stopped.load(Ordering::Relaxed) {
            match rustix::fs::stat(&dir) {
                Ok(_) => drop(count.fetch_add(1, Ordering::Relaxed)),
                Err(error) if !stopped.load(Ordering::Relaxed) => {
                    return eprintln!("a call over the {transport} fails: {error}");
                }
                Err(_) => return,
            }
        }
    };
    std::thread::scope(|scope| {
        // Dropped before the clients are waited for, also if something fails.
        let connection = connection;
        let (others, fresh) = counts.split_at(CLIENTS);
        for count in others {
            scope.spawn(|| call(count));
        }
        let mut server = connection.start_server(transport);
        let end = |mut server: Child| {
            server.kill().unwrap();
            server.wait().unwrap();
        };
        let mut lost = None;
        for death in 1..=MAX_DEATHS {
            assert!(have_all_moved(others), "clients do not start over the {transport}");
            std::thread::sleep(Duration::from_millis(30));
            end(server);
            server = connection.start_server(transport);
            if !have_all_moved(others) {
                // It is the request that is lost: the new server serves new ones.
                scope.spawn(|| call(&fresh[0]));
                let is_served = have_all_moved(fresh);
                assert!(is_served, "the second server over the {transport} serves nothing");
                lost = Some(death);
                break;
            }
        }
        stopped.store(true, Ordering::Relaxed);
        drop(connection);
        end(server);
        lost
    })
}

/// Returns true once each client has made some calls, false if one needs too long.
fn have_all_moved(counts: &[AtomicU64]) -> bool {
    let begin: Vec<u64> = counts.iter().map(|it| it.load(Ordering::Relaxed)).collect();
    let since = Instant::now();
    loop {
        let has_moved =
            |(now, before): (&AtomicU64, &u64)| now.load(Ordering::Relaxed) > before + 9;
        if counts.iter().zip(&begin).all(has_moved) {
            return true;
        }
        if since.elapsed() > CALL_LIMIT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Serves a connection with one directory until it is aborted or this process is killed.
fn serve(fuse: BorrowedFd<'_>, over_rings: bool) {
    let rings = over_rings.then(|| RingSet::new(fuse).unwrap());
    std::thread::scope(|scope| {
        for queue in rings.iter().flat_map(RingSet::queues) {
            scope.spawn(|| {
                queue.start().unwrap();
                let mut arrived = vec![];
                while queue.collect(&mut arrived).unwrap() {
                    if arrived.is_empty() {
                        queue.sleep().unwrap();
                    }
                    for index in arrived.drain(..) {
                        let mut header = vec![];
                        queue.read_request(index, |[head, ..]| header.extend_from_slice(head));
                        let (error, body) = answer(&header);
                        let head = encode_head(&header, error, body.len());
                        queue.answer(index, &[IoSlice::new(&head), IoSlice::new(&body)]);
                    }
                }
            });
        }
        // Refused before there was a server.
        let _ = rustix::io::write(fuse, Reply::resend_notification().as_bytes());
        let mut request = vec![0; MAX_REQUEST_BYTES];
        loop {
            match rustix::io::read(fuse, &mut request[..]) {
                Ok(_) => {}
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => continue,
                Err(_) => break,
            }
            if !matches!(u32_at(&request, 4), Some(FORGET | BATCH_FORGET)) {
                let (error, body) = answer(&request);
                write_reply(fuse, &request, error, &body);
            }
        }
    });
}

/// Returns the negative error, or 0, and the body of the answer to a request.
fn answer(request: &[u8]) -> (i32, Vec<u8>) {
    if !matches!(u32_at(request, 4), Some(GETATTR)) {
        return (-Errno::NOSYS.raw_os_error(), vec![]);
    }
    // `struct fuse_attr_out`: the number of the inode, mode and links.
    let mut body = vec![0; 104];
    body[16] = 1;
    body[76..80].copy_from_slice(&0o40_700_u32.to_ne_bytes());
    body[80] = 2;
    (0, body)
}

fn encode_head(request: &[u8], error: i32, body_bytes: usize) -> [u8; HEADER_OUT_BYTES as usize] {
    let mut head = [0; HEADER_OUT_BYTES as usize];
    head[..4].copy_from_slice(&(HEADER_OUT_BYTES + body_bytes as u32).to_ne_bytes());
    head[4..8].copy_from_slice(&error.to_ne_bytes());
    head[8..].copy_from_slice(&u64_at(request, 8).unwrap().to_ne_bytes());
    head
}

fn write_reply(fuse: BorrowedFd<'_>, request: &[u8], error: i32, body: &[u8]) {
    let head = encode_head(request, error, body.len());
    // Refused if the client is gone.
    let _ = rustix::io::writev(fuse, &[IoSlice::new(&head), IoSlice::new(body)]);
}
