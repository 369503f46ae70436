//! Acknowledged puts that a power cut takes away: of `LocalFileSystem`, with and without `fsync`,
//! and of this crate, each on an ext4 of its own. As root:
//!
//! ```sh
//! cargo run --release -p draconis-object-store --example cuts -- DIRECTORY [CUTS [FIRST]]
//! ```
//!
//! FIRST is the number of the first cut, from which contents and lengths follow, so that runs add up.
//!
//! The ext4 is on a loop device with direct I/O, so its file holds what the kernel has sent to the
//! disk. A copy of that file, made right after some puts, is what a power cut leaves. It is mounted
//! and read. The loop device has no write cache: most disks lose more.

use std::path::Path as HostPath;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::Random;
use draconis_object_store::{DraconisStore, NewStore};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

const DISK_BYTES: u64 = 256 << 20;
const STORE_BYTES: u64 = 160 << 20;
const PUTS_PER_CUT: u64 = 10;
const MAX_OBJECT_BYTES: u64 = 60_000;

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect(program);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// An image, mounted through a loop device.
struct Mounted {
    device: String,
    at: String,
}

impl Mounted {
    fn mount(image: &HostPath, at: &HostPath) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let (image, at) = (image.to_str().unwrap(), at.to_str().unwrap().to_owned());
        let device = run("losetup", &["--direct-io=on", "--find", "--show", image]);
        run("mount", &["-t", "ext4", &device, &at]);
        Self { device, at }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        HostPath::new(&self.at).join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A file that was just closed may keep it busy for a moment.
        for _ in 0..50 {
            if Command::new("umount").arg(&self.at).status().is_ok_and(|status| status.success()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Files { fsync: bool },
    Draconis,
}

fn open(kind: Kind, on: &Mounted, is_new: bool) -> Arc<dyn ObjectStore> {
    let (files, store) = (on.path("files"), on.path("objects.store"));
    match kind {
        Kind::Files { fsync } => {
            if is_new {
                std::fs::create_dir(&files).unwrap();
            }
            Arc::new(LocalFileSystem::new_with_prefix(&files).unwrap().with_fsync(fsync))
        }
        Kind::Draconis if is_new => {
            let new = NewStore { len_bytes: Some(STORE_BYTES), ..NewStore::default() };
            Arc::new(DraconisStore::create(&store, &new).unwrap())
        }
        Kind::Draconis => Arc::new(DraconisStore::open(&store).unwrap()),
    }
}

/// Contents of a put.
fn contents(cut: u64, nth: u64) -> Vec<u8> {
    let mut dice = Random::new(cut << 8 | nth);
    let mut bytes = vec![0; 1 + dice.next_below(MAX_OBJECT_BYTES) as usize];
    dice.fill(&mut bytes);
    bytes
}

fn path(cut: u64, nth: u64) -> Path {
    Path::from(format!("{cut}/{nth}"))
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().expect("a directory for the images");
    let mut number =
        |default| arguments.next().map_or(default, |text| text.parse::<u64>().unwrap());
    let (cuts, first) = (number(100), number(0));
    let dir = tempfile::tempdir_in(dir).unwrap();
    let (image, copy) = (dir.path().join("disk"), dir.path().join("cut"));
    println!("store\tcuts\tputs acknowledged\tmissing\tother contents");
    for (name, kind) in [
        ("LocalFileSystem", Kind::Files { fsync: false }),
        ("LocalFileSystem with fsync", Kind::Files { fsync: true }),
        ("DraconisStore", Kind::Draconis),
    ] {
        std::fs::File::options()
            .write(true)
            .create_new(true)
            .open(&image)
            .unwrap()
            .set_len(DISK_BYTES)
            .unwrap();
        run("mkfs.ext4", &["-q", "-F", image.to_str().unwrap()]);
        let disk = Mounted::mount(&image, &dir.path().join("disk.mnt"));
        let store = open(kind, &disk, true);
        run("sync", &["-f", &disk.at]);
        let (mut missing, mut wrong) = (0, 0);
        for cut in first..first + cuts {
            for nth in 0..PUTS_PER_CUT {
                store.put(&path(cut, nth), contents(cut, nth).into()).await.unwrap();
            }
            run("cp", &["--sparse=always", image.to_str().unwrap(), copy.to_str().unwrap()]);
            {
                let after = Mounted::mount(&copy, &dir.path().join("cut.mnt"));
                let found = open(kind, &after, false);
                for nth in 0..PUTS_PER_CUT {
                    match found.get(&path(cut, nth)).await {
                        Err(_) => missing += 1,
                        Ok(got) => {
                            let is_same =
                                got.bytes().await.is_ok_and(|bytes| bytes == contents(cut, nth));
                            wrong += u64::from(!is_same);
                        }
                    }
                }
            }
            // So that the disk does not fill up; not durable at once with any of them.
            for nth in 0..PUTS_PER_CUT {
                store.delete(&path(cut, nth)).await.unwrap();
            }
        }
        println!("{name}\t{cuts}\t{}\t{missing}\t{wrong}", cuts * PUTS_PER_CUT);
        drop(store);
        drop(disk);
        std::fs::remove_file(&image).unwrap();
    }
}
