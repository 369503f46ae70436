//! The same loops as in loops.c by the library alone: what is left when no call has a transport.

use std::sync::Arc;
use std::time::Instant;

use draconis_ext::{
    AccessTimes, FileDisk, FileOptions, FileType, NewNode, OpenOptions, RenameMode, Time, Volume,
    WriteOptions,
};

const FILES: usize = 20_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let image = std::env::args_os().nth(1).ok_or("usage: library IMAGE")?;
    let disk = FileDisk::open(
        std::path::Path::new(&image),
        FileOptions { write: true, direct: false, uring: false },
    )?;
    let clock = Arc::new(|| Time { seconds: 1_800_000_000, nanoseconds: 0 });
    let (atime, discard) = (AccessTimes::Never, false);
    let writing = WriteOptions { clock, dirty_bytes: 64 << 20, atime, discard };
    let volume =
        Arc::new(Volume::open_for_writing(Arc::new(disk), OpenOptions::default(), writing)?);
    let committing = Arc::clone(&volume);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(std::time::Duration::from_millis(100));
            if committing.commit().is_err() {
                return;
            }
        }
    });
    let node = |kind, mode| NewNode { kind, mode, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let mut dirs = Vec::new();
    for dir in 0..FILES / 1000 {
        let name = format!("library{dir}");
        dirs.push(volume.create(
            volume.root(),
            name.as_bytes(),
            &node(FileType::Directory, 0o755),
        )?);
    }
    let timed = |label: &str, call: &mut dyn FnMut(usize) -> draconis_ext::Result<()>| {
        let from = Instant::now();
        for nth in 0..FILES {
            call(nth)?;
        }
        println!("{label} {:.2}", from.elapsed().as_secs_f64() * 1e6 / FILES as f64);
        Ok::<(), draconis_ext::Error>(())
    };
    let content = [b'x'; 4096];
    let name = |kind: &str, nth: usize| format!("{kind}{nth}").into_bytes();
    timed("create", &mut |nth| {
        let made =
            volume.create(dirs[nth / 1000], &name("f", nth), &node(FileType::File, 0o644))?;
        volume.write(made, 0, &content).map(drop)
    })?;
    timed("stat", &mut |nth| {
        let found = volume.lookup(dirs[nth / 1000], &name("f", nth))?;
        volume.attributes(found).map(drop)
    })?;
    timed("rename", &mut |nth| {
        let dir = dirs[nth / 1000];
        volume.rename(dir, &name("f", nth), dir, &name("g", nth), RenameMode::Replace)
    })?;
    timed("unlink", &mut |nth| volume.unlink(dirs[nth / 1000], &name("g", nth)))?;
    volume.close()?;
    Ok(())
}
