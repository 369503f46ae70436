//! Lists a volume in memory and reads its files, by path.
//!
//! `cargo run -p draconis-ext --example list_and_read`

use std::path::Path;
use std::sync::Arc;

use draconis_device::MemoryDisk;
use draconis_ext::FileSystem;
use draconis_ext::mkfs::FormatOptions;
use draconis_types::FileType;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Any `Disk` can hold a volume. This one reads as zeros, so nothing needs to be cleared.
    let disk = Arc::new(MemoryDisk::new(vec![0; 8 << 20], 512));
    let fs = FileSystem::create_on(disk, &FormatOptions::default(), true)?;
    fs.create_dir_all("/notes/old")?;
    fs.write("/notes/today", "Read the manual.\n")?;
    fs.write("/notes/old/yesterday", "Write the manual.\n")?;

    print_tree(&fs, Path::new("/notes"))?;
    assert_eq!(fs.read_to_string("/notes/today")?, "Read the manual.\n");
    let missing = fs.read("/notes/tomorrow").unwrap_err();
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    Ok(fs.close()?)
}

fn print_tree(fs: &FileSystem, dir: &Path) -> std::io::Result<()> {
    for entry in fs.read_dir(dir)? {
        let path = entry.path();
        if entry.file_type() == FileType::Directory {
            print_tree(fs, path)?;
        } else {
            println!("{}: {}", path.display(), fs.read_to_string(path)?.trim_end());
        }
    }
    Ok(())
}
