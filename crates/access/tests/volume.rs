//! A volume by paths: made, changed, listed, archived, checked, closed.

use std::path::Path;
use std::sync::Arc;

use draconis_access::tar::SparseFormat;
use draconis_access::{Error, File, NewVolume, OpenOptions, Volume, VolumeLocation};
use draconis_ext::{Follow, RenameMode};
use draconis_types::FileType;
use rustix::io::Errno;

fn make_volume(dir: &Path, kind: &str) -> std::path::PathBuf {
    let image = dir.join(format!("{kind}.img"));
    let new = NewVolume { kind: kind.into(), len_bytes: Some(16 << 20), ..NewVolume::default() };
    Volume::create(&image, &new).unwrap();
    image
}

fn write_file(volume: &Arc<Volume>, path: &[u8], bytes: &[u8]) {
    let how = OpenOptions { write: true, create: true, mode: 0o644, ..OpenOptions::default() };
    let file = File::open(volume, path, how).unwrap();
    assert_eq!(file.write_at(0, bytes).unwrap(), bytes.len());
}

fn read(volume: &Arc<Volume>, path: &[u8]) -> Result<Vec<u8>, Error> {
    let file = File::open(volume, path, OpenOptions::default())?;
    let mut bytes = vec![0; file.stat()?.size_bytes as usize];
    let len = file.read_at(0, &mut bytes)?;
    assert_eq!(len, bytes.len());
    Ok(bytes)
}

/// What e2fsck says, where it is there.
fn assert_clean_by_e2fsck(image: &Path) {
    let checked = Volume::check(image, &VolumeLocation::default()).unwrap();
    assert!(checked.is_clean(), "{:?}", checked.0.problems);
    draconis_testkit::judge::run_tool("e2fsck", &["-fn", image.to_str().unwrap()]);
}

#[test]
fn read_and_write_files_by_path() {
    let dir = tempfile::tempdir().unwrap();
    for kind in ["ext2", "ext4"] {
        let image = make_volume(dir.path(), kind);
        let volume = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap();
        volume.make_dir(b"/etc", 0o755).unwrap();
        write_file(&volume, b"/etc/hosts", b"127.0.0.1 localhost\n");
        volume.symlink(b"etc/hosts", b"/hosts").unwrap();
        volume.link(b"/etc/hosts", b"/etc/again").unwrap();
        volume.rename(b"/etc/again", b"/etc/moved", RenameMode::NoReplace).unwrap();
        assert_eq!(read(&volume, b"/hosts").unwrap(), b"127.0.0.1 localhost\n");
        assert_eq!(volume.read_link(b"/hosts").unwrap(), b"etc/hosts");
        let (names, damage) = volume.list(b"/etc").unwrap();
        let names: Vec<_> = names.iter().map(|entry| (&entry.name[..], entry.kind)).collect();
        assert_eq!(names, [(&b"hosts"[..], FileType::File), (b"moved", FileType::File)]);
        assert_eq!(damage, None);
        volume.unlink(b"/etc/moved").unwrap();
        assert_eq!(volume.stat(b"/etc/hosts", Follow::No).unwrap().links, 1);
        let mut archive = vec![];
        assert_eq!(volume.tar(b"/etc", SparseFormat::Auto, &mut archive).unwrap(), [""; 0]);
        assert!(archive.windows(9).any(|name| name == b"etc/hosts"));
        volume.close().unwrap();
        assert_clean_by_e2fsck(&image);
        let volume = Volume::open(&image, &VolumeLocation::default()).unwrap();
        assert_eq!(read(&volume, b"/etc/hosts").unwrap(), b"127.0.0.1 localhost\n");
    }
}

#[test]
fn errors_have_errno_and_path() {
    let dir = tempfile::tempdir().unwrap();
    let image = make_volume(dir.path(), "ext4");
    let refused = |wanted: Errno, error: Error, says: &str| {
        assert_eq!(error.errno, wanted, "{error}");
        assert!(error.message.contains(says), "{error}");
    };
    let missing = Volume::open(&dir.path().join("none"), &VolumeLocation::default()).unwrap_err();
    refused(Errno::NOENT, missing, "none");
    let text = dir.path().join("text");
    std::fs::write(&text, "not a volume").unwrap();
    refused(
        Errno::INVAL,
        Volume::open(&text, &VolumeLocation::default()).unwrap_err(),
        "text: too short",
    );
    let again = Volume::create(&image, &NewVolume::default()).unwrap_err();
    refused(Errno::EXIST, again, "ext4.img holds");
    let volume = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap();
    let second = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap_err();
    refused(Errno::BUSY, second, "ext4.img is in use");
    refused(Errno::NOENT, read(&volume, b"/x/y").unwrap_err(), "ext4.img:/x/y: no such file");
    refused(Errno::ISDIR, read(&volume, b"/").unwrap_err(), "ext4.img:/: is a directory");
    refused(Errno::INVAL, volume.remove_dir(b"/").unwrap_err(), "root directory");
    write_file(&volume, b"/lost+found/x", b"");
    refused(Errno::NOTEMPTY, volume.remove_dir(b"/lost+found").unwrap_err(), "not empty");
    let beyond = VolumeLocation { partition: Some(9), ..VolumeLocation::default() };
    assert!(Volume::check(&text, &beyond).is_err());
    write_file(&volume, b"/a", b"1");
    let file = File::open(&volume, b"/a", OpenOptions::default()).unwrap();
    refused(Errno::BADF, file.write_at(0, b"2").unwrap_err(), "/a: was opened for reading");
    let new = OpenOptions { create: true, exclusive: true, ..OpenOptions::default() };
    refused(Errno::EXIST, File::open(&volume, b"/a", new).unwrap_err(), "/a: file exists");
    volume.close().unwrap();
    refused(Errno::BADF, file.stat().unwrap_err(), "the volume was closed");
    refused(Errno::BADF, volume.stat(b"/a", Follow::No).unwrap_err(), "the volume was closed");
    let volume = Volume::open(&image, &VolumeLocation::default()).unwrap();
    refused(Errno::ROFS, volume.make_dir(b"/b", 0o755).unwrap_err(), "/b: read-only");
    assert_clean_by_e2fsck(&image);
}

#[test]
fn unlinked_open_file_stays_usable() {
    let dir = tempfile::tempdir().unwrap();
    let image = make_volume(dir.path(), "ext4");
    let volume = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap();
    write_file(&volume, b"/a", b"kept");
    let how = OpenOptions { write: true, ..OpenOptions::default() };
    let file = File::open(&volume, b"/a", how).unwrap();
    volume.unlink(b"/a").unwrap();
    file.write_at(4, b" until closed").unwrap();
    let mut bytes = [0; 17];
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), 17);
    assert_eq!(&bytes, b"kept until closed");
    drop(file);
    volume.close().unwrap();
    assert_clean_by_e2fsck(&image);
}

#[test]
fn close_waits_for_other_threads() {
    let dir = tempfile::tempdir().unwrap();
    let image = make_volume(dir.path(), "ext4");
    let volume = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let volume = &volume;
            scope.spawn(move || {
                for nth in 0..25u8 {
                    let path = format!("/{thread}-{nth}");
                    write_file(volume, path.as_bytes(), &[thread; 5000]);
                    assert_eq!(read(volume, path.as_bytes()).unwrap(), [thread; 5000]);
                }
            });
        }
    });
    assert_eq!(volume.list(b"/").unwrap().0.len(), 101, "and lost+found");
    volume.close().unwrap();
    assert_clean_by_e2fsck(&image);
}

#[test]
fn create_follows_symlinks_and_refuses_trailing_slash() {
    let dir = tempfile::tempdir().unwrap();
    let image = make_volume(dir.path(), "ext4");
    let volume = Volume::open_for_writing(&image, &VolumeLocation::default()).unwrap();
    volume.make_dir(b"/d", 0o755).unwrap();
    volume.symlink(b"d/next", b"/link").unwrap();
    volume.symlink(b"../file", b"/d/next").unwrap();
    volume.symlink(b"loop", b"/loop").unwrap();
    write_file(&volume, b"/link", b"by two links");
    assert_eq!(read(&volume, b"/file").unwrap(), b"by two links");
    volume.unlink(b"/file").unwrap();
    let how = OpenOptions { write: true, create: true, mode: 0o644, ..OpenOptions::default() };
    for (path, exclusive, errno) in [
        (&b"/new/"[..], false, Errno::ISDIR),
        (b"/new/", true, Errno::ISDIR),
        (b"/link", true, Errno::EXIST),
        (b"/loop", false, Errno::LOOP),
        (b"/", true, Errno::EXIST),
        (b"/d", false, Errno::ISDIR),
        (b"/none/x", false, Errno::NOENT),
    ] {
        let error = File::open(&volume, path, OpenOptions { exclusive, ..how }).unwrap_err();
        let shown = String::from_utf8_lossy(path);
        assert_eq!(error.errno, errno, "{shown}: {error}");
        assert!(error.to_string().contains(&format!(":{shown}")), "{error}");
    }
    assert_eq!(volume.make_dir(b"/", 0o755).unwrap_err().errno, Errno::EXIST);
    let (names, _) = volume.list(b"/").unwrap();
    let names: Vec<_> = names.into_iter().map(|entry| entry.name).collect();
    assert_eq!(names, [&b"d"[..], b"link", b"loop", b"lost+found"]);
    volume.close().unwrap();
    assert_clean_by_e2fsck(&image);
}
