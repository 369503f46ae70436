//! Durable puts of one client on modelled devices, beside one file for each object:
//!
//! ```sh
//! cargo run -p draconis-object-store --example put_devices
//! ```
//!
//! Times are those of the device. `LocalFileSystem` needs a kernel's file system, which cannot be on
//! a model. So the files are on our own ext4, with the calls that it makes with `fsync`: a new file
//! is written and synced, renamed, and its directory synced.

mod models;

use draconis_object_store::DraconisStore;
use models::{DEVICES, device, new_ext4, new_store, sync};
use object_store::ObjectStoreExt;
use object_store::path::Path;

/// Lengths of objects, and puts of each.
const LENGTHS: [(usize, u64); 3] = [(1 << 10, 200), (64 << 10, 100), (8 << 20, 8)];

#[tokio::main(flavor = "current_thread")]
async fn main() {
    println!("device\tbytes\tms a put, store\tms a put, files\tratio");
    for name in DEVICES {
        for (len, puts) in LENGTHS {
            let contents = vec![0x5a; len];
            let (disk, clock) = device(name);
            let store = DraconisStore::from_store(new_store(disk)).unwrap();
            let began = clock.now_ns();
            for nth in 0..puts {
                store.put(&Path::from(format!("{nth}")), contents.clone().into()).await.unwrap();
            }
            let ours = (clock.now_ns() - began) / puts;
            drop(store);
            let (disk, clock) = device(name);
            let files = new_ext4(disk);
            let began = clock.now_ns();
            for nth in 0..puts {
                files.write(format!("/{nth}#1"), &contents).unwrap();
                sync(&files, &format!("{nth}#1"));
                files.rename(format!("/{nth}#1"), format!("/{nth}")).unwrap();
                sync(&files, "");
            }
            let theirs = (clock.now_ns() - began) / puts;
            let ms = |ns: u64| ns as f64 / 1e6;
            let ratio = theirs as f64 / ours as f64;
            println!("{name}\t{len}\t{:.3}\t{:.3}\t{ratio:.1}", ms(ours), ms(theirs));
        }
    }
}
