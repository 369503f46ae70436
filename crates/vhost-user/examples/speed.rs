//! Rate of a vhost-user disk: `speed SOCKET|FILE`. A file is served in this process.

#[path = "../tests/driver/mod.rs"]
mod driver;

use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use draconis_device::{FileDisk, FileOptions};
use draconis_vhost_user::{Device, Resources, serve};
use driver::*;

fn connect(path: &std::path::Path) -> UnixStream {
    if std::fs::metadata(path).unwrap().file_type().is_socket() {
        return UnixStream::connect(path).unwrap();
    }
    let options = FileOptions { write: true, direct: false, uring: false };
    let device = Arc::new(Device::new(Arc::new(FileDisk::open(path, options).unwrap()), ""));
    let resources = Arc::new(Resources::new().unwrap());
    let (stream, other) = UnixStream::pair().unwrap();
    std::thread::spawn(move || serve(other, &device, &resources).unwrap());
    stream
}

fn main() {
    let path = std::path::PathBuf::from(std::env::args_os().nth(1).expect("SOCKET|FILE"));
    let mut driver = Driver::connect(connect(&path), Guest::new(), u64::MAX);
    let sectors = u64::from_le_bytes(driver.config(0, 8).try_into().unwrap());
    let mut place = 1u64;
    println!("{:>6} {:>8} {:>6} {:>10} {:>8}", "", "bytes", "depth", "requests/s", "MB/s");
    for (name, kind) in [("read", READ), ("write", OUT)] {
        for (len, depth) in [(4096u32, 1), (4096, 16), (131_072, 1), (131_072, 8)] {
            let data = if kind == OUT { vec![1; len as usize] } else { vec![] };
            let output = if kind == OUT { 0 } else { len };
            for head in 0..depth {
                driver.guest.write_request(3 * head, kind, 0, &data, output);
            }
            let mut send = |driver: &mut Driver, head: u16| {
                place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let units = sectors * 512 / u64::from(len);
                let sector = (place >> 20) % units * u64::from(len) / 512;
                driver.guest.set_sector(head, sector);
                driver.guest.make_available(head);
                if driver.guest.wants_kick() {
                    driver.kick();
                }
            };
            let (start, mut count) = (Instant::now(), 0u64);
            (0..depth).for_each(|head| send(&mut driver, 3 * head));
            while start.elapsed() < Duration::from_secs(2) {
                let Some((head, _)) = driver.guest.take_used() else {
                    std::thread::yield_now();
                    continue;
                };
                assert_eq!(driver.guest.status(head), OK);
                count += 1;
                send(&mut driver, head);
            }
            let rate = count as f64 / start.elapsed().as_secs_f64();
            (0..depth).for_each(|_| assert!(driver.wait_used().is_some()));
            let megabytes = rate * f64::from(len) / 1e6;
            println!("{name:>6} {len:>8} {depth:>6} {rate:>10.0} {megabytes:>8.0}");
        }
    }
}
