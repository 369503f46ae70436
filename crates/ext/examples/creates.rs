use draconis_device::{FileDisk, FileOptions};
use draconis_exchange::contract::{Kind, Time};
use draconis_ext::*;
use std::sync::Arc;
use std::time::Instant;
fn main() {
    let path = std::env::args().nth(1).unwrap();
    let count: u32 = std::env::args().nth(2).unwrap().parse().unwrap();
    let disk = Arc::new(
        FileDisk::open(
            std::path::Path::new(&path),
            FileOptions { write: true, direct: true, uring: true },
        )
        .unwrap(),
    );
    let clock = || {
        let d = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Time { seconds: d.as_secs() as i64, nanoseconds: d.subsec_nanos() }
    };
    let volume = Volume::open_for_writing(
        disk,
        Options::default(),
        Writing { clock: Arc::new(clock), dirty_bytes: 64 << 20, atime: AccessTimes::Relative },
    )
    .unwrap();
    let new =
        NewNode { kind: Kind::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let dirnode = NewNode { kind: Kind::Directory, ..new };
    let start = Instant::now();
    let mut dirs = vec![];
    for d in 0..count / 1000 {
        dirs.push(volume.create(volume.root(), format!("d{d}").as_bytes(), &dirnode).unwrap());
    }
    for n in 0..count {
        volume.create(dirs[(n / 1000) as usize], format!("file{n}").as_bytes(), &new).unwrap();
    }
    let t = start.elapsed();
    println!(
        "create empty: {:.0}/s {:.2} us",
        count as f64 / t.as_secs_f64(),
        t.as_secs_f64() * 1e6 / count as f64
    );
    let start = Instant::now();
    volume.sync().unwrap();
    println!("sync {:?}", start.elapsed());
    let start = Instant::now();
    let bytes = vec![7u8; 4096];
    for n in 0..count {
        let dir = dirs[(n / 1000) as usize];
        let ino = volume.lookup(dir, format!("file{n}").as_bytes()).unwrap();
        volume.write(ino, 0, &bytes).unwrap();
    }
    let t = start.elapsed();
    println!(
        "write 4k: {:.0}/s {:.2} us",
        count as f64 / t.as_secs_f64(),
        t.as_secs_f64() * 1e6 / count as f64
    );
    let start = Instant::now();
    volume.sync().unwrap();
    println!("sync {:?}", start.elapsed());
    let start = Instant::now();
    for n in 0..count {
        let dir = dirs[(n / 1000) as usize];
        volume
            .rename(
                dir,
                format!("file{n}").as_bytes(),
                dir,
                format!("xile{n}").as_bytes(),
                Renaming::Replace,
            )
            .unwrap();
    }
    let t = start.elapsed();
    println!(
        "rename: {:.0}/s {:.2} us",
        count as f64 / t.as_secs_f64(),
        t.as_secs_f64() * 1e6 / count as f64
    );
    let start = Instant::now();
    for n in 0..count {
        let dir = dirs[(n / 1000) as usize];
        volume.unlink(dir, format!("xile{n}").as_bytes()).unwrap();
    }
    let t = start.elapsed();
    println!(
        "unlink: {:.0}/s {:.2} us",
        count as f64 / t.as_secs_f64(),
        t.as_secs_f64() * 1e6 / count as f64
    );
    let start = Instant::now();
    volume.sync().unwrap();
    println!("sync {:?}", start.elapsed());
    let big = vec![1u8; 1 << 20];
    let ino = volume.create(volume.root(), b"big", &new).unwrap();
    let start = Instant::now();
    for n in 0..400u64 {
        volume.write(ino, n << 20, &big).unwrap();
    }
    println!("write 400M: {:?}", start.elapsed());
    volume.sync().unwrap();
    println!("with sync: {:.0} MB/s", 400.0 * 1.048 / start.elapsed().as_secs_f64());
    let start = Instant::now();
    let small = vec![2u8; 512];
    for n in 0..1000u64 {
        volume.write(ino, (400 << 20) + n * 512, &small).unwrap();
        volume.sync_inode(ino, false).unwrap();
    }
    println!("append+fsync: {:.0}/s", 1000.0 / start.elapsed().as_secs_f64());
    volume.close().unwrap();
}
