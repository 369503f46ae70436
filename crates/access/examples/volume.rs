//! Makes a volume in an image file, writes and reads a file by path, and checks the volume.
//!
//! `cargo run -p draconis-access --example volume`

use draconis_access::{File, NewVolume, OpenOptions, Volume, VolumeLocation};

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let image = dir.path().join("disk.img");
    // Which part of the image: a partition, or as here all of it.
    let whole = VolumeLocation::default();
    let new = NewVolume { kind: "ext4".into(), len_bytes: Some(16 << 20), ..NewVolume::default() };
    Volume::create(&image, &new)?;

    let volume = Volume::open_for_writing(&image, &whole)?;
    volume.make_dir(b"/etc", 0o755)?;
    let how = OpenOptions { write: true, create: true, mode: 0o644, ..OpenOptions::default() };
    let file = File::open(&volume, b"/etc/hosts", how)?;
    file.write_at(0, b"127.0.0.1 localhost\n")?;
    // `sync` returns once the file is durable.
    file.sync()?;
    volume.symlink(b"etc/hosts", b"/hosts")?;

    let file = File::open(&volume, b"/hosts", OpenOptions::default())?;
    let mut bytes = [0; 100];
    let len = file.read_at(0, &mut bytes)?;
    print!("{}", String::from_utf8_lossy(&bytes[..len]));
    volume.close()?;
    assert!(Volume::check(&image, &whole)?.is_clean());
    Ok(())
}
