//! Opens the extent files of a disk image whose text descriptor names several files.
//!
//! Law: a name leads to a regular file in the descriptor's directory or below it, or is refused.
//! The kernel enforces this even while names and links change (`openat2`, `RESOLVE_BENEATH`).

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Opens for reading the file `name` of the text descriptor at `image`.
///
/// # Errors
/// The system's error; `EXDEV` if the name leads out of the directory.
pub fn open_extent_file(image: &Path, name: &Path) -> rustix::io::Result<OwnedFd> {
    let dir = match image.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let at = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(dir, at, Mode::empty())?;
    // Without NONBLOCK, opening a FIFO would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(&dir, name, flags, Mode::empty(), resolve)?;
    let found = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    rustix::fs::fcntl_setfl(&file, OFlags::empty())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn extent_file_outside_directory_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("dir");
        std::fs::create_dir_all(dir.join("sub")).unwrap();
        for file in ["secret", "dir/a", "dir/sub/b"] {
            std::fs::write(temporary.path().join(file), file).unwrap();
        }
        symlink("sub/b", dir.join("inside")).unwrap();
        symlink("..", dir.join("up")).unwrap();
        symlink("../secret", dir.join("out")).unwrap();
        symlink(dir.join("a"), dir.join("absolute")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.join("pipe"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        let image = dir.join("image");
        let is_opened = |name: &str| open_extent_file(&image, Path::new(name)).is_ok();
        for name in ["a", "./a", "sub/b", "inside", "sub/../a"] {
            assert!(is_opened(name), "{name}");
        }
        let secret = temporary.path().join("secret");
        for name in
            ["../secret", "out", "up/secret", "absolute", "pipe", "sub", secret.to_str().unwrap()]
        {
            assert!(!is_opened(name), "{name}");
        }
    }
}
