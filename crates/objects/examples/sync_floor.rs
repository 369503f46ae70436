//! Durable puts of 512 bytes on files that are created in three ways, compared to the floor: a
//! write of 4 KiB and `fdatasync` to a file with allocated, written blocks.
//!
//! ```text
//!   sparse     one hole: each commit has the file system find room
//!   reserved   fallocate: room, marked as unwritten until it is written
//!   written    zeros were written: nothing of the file changes but its bytes
//! ```
//!
//! In turns, so that other users of the disk affect all of them; medians.
//!
//! `cargo run -p draconis-objects --release --example sync_floor -- DIRECTORY [TURNS]`

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use draconis_device::{Disk, FileDisk, FileOptions};
use draconis_objects::kv::Kv;
use draconis_objects::{CreateOptions, LayoutKind, OpenOptions, Profile, Store};
use draconis_types::PrivateBuffer;
use rustix::fs::{FallocateFlags, OFlags};

const FILE_BYTES: u64 = 1 << 30;
const MEASURED_PUTS: u64 = 200;

type Failure = Box<dyn std::error::Error>;

#[derive(Clone, Copy, Debug)]
enum FileKind {
    Sparse,
    Reserved,
    Written,
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("sync_floor DIRECTORY [TURNS]")?;
    let turns = args.next().map_or(Ok(15), |it| it.parse())?;
    let dir = tempfile::tempdir_in(dir)?;
    let floor = create_file(&dir.path().join("floor"), FileKind::Written)?;
    let stores = [
        (FileKind::Sparse, false),
        (FileKind::Reserved, false),
        (FileKind::Written, false),
        (FileKind::Written, true),
    ];
    let stores = stores
        .iter()
        .map(|&(made, uring)| {
            let path = dir.path().join(format!("{made:?}{uring}"));
            Ok((format!("{made:?}, uring {uring}"), create_store(&path, made, uring)?))
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    let mut times: Vec<Vec<f64>> = vec![vec![]; stores.len() + 1];
    let mut put = 0u64;
    for turn in 0..turns {
        times[0].push(time_write_and_flush(&floor, turn * MEASURED_PUTS)?);
        for (nth, (_, kv)) in stores.iter().enumerate() {
            let began = Instant::now();
            for _ in 0..MEASURED_PUTS {
                put += 1;
                let key = format!("{:016}", put.wrapping_mul(7_919) % 100_000);
                kv.wait(kv.put(key.as_bytes(), &[put as u8; 512])?)?;
            }
            times[nth + 1].push(micros(began));
        }
    }
    let floor = median(&mut times[0]);
    println!("{:28} {floor:7.1} µs {:7.0}/s", "write 4 KiB and fdatasync", 1e6 / floor);
    for ((name, _), times) in stores.iter().zip(&mut times[1..]) {
        let time = median(times);
        println!(
            "{name:28} {time:7.1} µs {:7.0}/s  {:.2} of the floor's rate",
            1e6 / time,
            floor / time
        );
    }
    Ok(())
}

fn create_file(path: &Path, made: FileKind) -> Result<File, Failure> {
    let mut options = File::options();
    options.read(true).write(true).create(true).custom_flags(OFlags::DIRECT.bits() as i32);
    let file = options.open(path)?;
    file.set_len(FILE_BYTES)?;
    match made {
        FileKind::Sparse => {}
        FileKind::Reserved => rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES)?,
        FileKind::Written => {
            let zeros = PrivateBuffer::new(1 << 20);
            (0..FILE_BYTES >> 20).try_for_each(|nth| file.write_all_at(&zeros, nth << 20))?;
        }
    }
    file.sync_all()?;
    Ok(file)
}

fn create_store(path: &Path, made: FileKind, uring: bool) -> Result<Kv, Failure> {
    let blocks = create_file(path, made)?.metadata()?.blocks();
    println!("{made:?}: {} MiB of {} are there", blocks >> 11, FILE_BYTES >> 20);
    let options = FileOptions { write: true, direct: true, uring };
    let disk: Arc<dyn Disk> = Arc::new(FileDisk::open(path, options)?);
    let profile = Profile {
        layout: LayoutKind::Cow,
        page_bytes: 4096,
        segment_bytes: 4 << 20,
        queue_depth: 16,
    };
    Store::create(disk.clone(), &CreateOptions { profile, id: 1 })?;
    Ok(Kv::new(Store::open(disk, &OpenOptions::default())?))
}

/// Returns the mean time of one write and flush in a turn.
fn time_write_and_flush(file: &File, first: u64) -> Result<f64, Failure> {
    let mut bytes = PrivateBuffer::new(4096);
    bytes.fill(7);
    let began = Instant::now();
    for nth in first..first + MEASURED_PUTS {
        file.write_all_at(&bytes, (nth << 12) % FILE_BYTES)?;
        file.sync_data()?;
    }
    Ok(micros(began))
}

fn micros(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e6 / MEASURED_PUTS as f64
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
