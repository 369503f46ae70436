//! Makes an ext4 volume in an image file, fills it by path, and closes it.
//!
//! `cargo run -p draconis-ext --example make_volume`

use draconis_ext::FileSystem;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let image = dir.path().join("disk.img");

    let fs = FileSystem::create(&image, 16 << 20)?;
    fs.create_dir_all("/etc/app")?;
    fs.write("/etc/app/greeting", "Dear reader,\n")?;
    fs.symlink("app/greeting", "/etc/greeting")?;
    fs.rename("/etc/app/greeting", "/etc/app/letter")?;
    // Changes are in memory until `sync` or `close` returns. Dropping `fs` would lose them.
    fs.sync()?;
    fs.hard_link("/etc/app/letter", "/etc/copy")?;
    fs.close()?;

    // `open` locks the image against other writers.
    let fs = FileSystem::open(&image)?;
    assert_eq!(fs.metadata("/etc/copy")?.links, 2);
    fs.remove_file("/etc/greeting")?;
    fs.close()?;
    println!("{}: {} bytes", image.display(), std::fs::metadata(&image)?.len());
    Ok(())
}
