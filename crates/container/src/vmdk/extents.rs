//! VMDK in several files: a descriptor file lists extents, each raw or sparse.
//!
//! ```text
//!   RW 4192256 SPARSE "disk-s001.vmdk"      0 ..───────┬────────────┬───────┐
//!   RW 1048576 FLAT "disk-f002.vmdk" 0                 │ 1st given  │ zeros │ 2nd given
//!   RW 2048 ZERO                                       └────────────┴───────┘
//! ```
//! Law 1: this module opens no files by name. It reads the given files in the order of their names;
//! lines with equal names share a file.
//! Law 2: [`extent_file_names`] lists only names in or below the directory of the descriptor file.
//! Law 3: a descriptor longer than [`MAX_DESCRIPTOR_BYTES`] or with more than [`MAX_EXTENTS`] lines
//! is an error.

use std::path::{Component, Path};
use std::sync::Arc;

use draconis_device::{Disk, Extent, Properties, SubDisk};

use super::{CID_NOPARENT, SECTOR_BYTES, Vmdk, descriptor_number};
use crate::image_file::ImageFile;
use crate::image_map::open_mapped;
use crate::read_only::{ReadOnlyDisk, ReadSource};
use crate::{Error, Format, UnsupportedFeature};

/// First line of a descriptor file, after an optional byte order mark.
const DESCRIPTOR_FIRST_LINE: &[u8] = b"# Disk DescriptorFile";
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
/// Maximum length of a descriptor file.
pub const MAX_DESCRIPTOR_BYTES: u64 = 64 << 10;
/// Maximum extents of one image.
pub const MAX_EXTENTS: usize = 64;
const MAX_SECTORS: u64 = 1 << 53;

/// An extent line of the descriptor.
struct ExtentLine<'a> {
    sectors: u64,
    what: ExtentKind<'a>,
}

#[derive(Clone, Copy)]
enum ExtentKind<'a> {
    Zeros,
    /// A file, and the sector in it where the extent begins.
    Flat(&'a str, u64),
    Sparse(&'a str),
}

/// Opens the disk that the files `given` hold together.
pub(crate) fn open(
    file: &ImageFile,
    given: &[Arc<dyn Disk>],
    properties: Properties,
) -> Result<Arc<dyn Disk>, Error> {
    if file.len_bytes() > MAX_DESCRIPTOR_BYTES {
        return Err(Error::Damaged("VMDK: a description longer than any is"));
    }
    let bytes = file.read_vec(0, file.len_bytes() as usize)?;
    let text = decode_descriptor(&bytes);
    if descriptor_number(&text, "parentCID")?.is_some_and(|id| id != CID_NOPARENT) {
        let what = "its contents in several files that differ from another image";
        return Err(UnsupportedFeature::Feature("VMDK", what).into());
    }
    let lines = parse_extent_lines(&text)?;
    let names = distinct_names(&lines);
    let (wanted, found) = (names.len(), given.len());
    if let Some(missing) = names.get(found) {
        let name = missing.chars().take(256).collect();
        return Err(match is_inside_directory(missing) {
            true => UnsupportedFeature::MissingExtents { name, wanted, found },
            false => UnsupportedFeature::ForeignExtentName(name),
        }
        .into());
    }
    let file_of = |name: &str| {
        let nth = names.iter().position(|known| *known == name);
        nth.and_then(|nth| given.get(nth)).ok_or(SHORT_EXTENT_ERROR)
    };
    let mut parts = vec![];
    let mut start_bytes = 0;
    for line in &lines {
        let len_bytes = line.sectors * SECTOR_BYTES;
        let disk = match line.what {
            ExtentKind::Zeros => None,
            ExtentKind::Flat(name, at) => Some(open_flat_extent(file_of(name)?, at, len_bytes)?),
            ExtentKind::Sparse(name) => Some(open_sparse_extent(file_of(name)?, len_bytes)?),
        };
        parts.push(ConcatenatedExtent { start_bytes, len_bytes, disk });
        start_bytes += len_bytes;
    }
    Ok(Arc::new(ReadOnlyDisk::new(start_bytes, properties, ConcatenatedExtents(parts))))
}

/// Opens a raw range of a file.
fn open_flat_extent(disk: &Arc<dyn Disk>, at: u64, len_bytes: u64) -> Result<ImageFile, Error> {
    let extent = Extent::new(at.saturating_mul(SECTOR_BYTES), len_bytes);
    let view = SubDisk::new(disk.clone(), extent);
    Ok(ImageFile::new(Arc::new(view.map_err(|_| SHORT_EXTENT_ERROR)?)))
}

const SHORT_EXTENT_ERROR: Error =
    Error::Damaged("VMDK: a file of its contents is shorter than it says");

fn open_sparse_extent(disk: &Arc<dyn Disk>, len_bytes: u64) -> Result<ImageFile, Error> {
    let source = ImageFile::new(disk.clone());
    let head = source.read_vec(0, source.len_bytes().min(512) as usize)?;
    if Format::detect(&head) != Some(Format::Vmdk) {
        return Err(Error::Damaged("VMDK: a file of its contents is not as sparse as it says"));
    }
    let map = Vmdk::open(&source)?;
    if map.len_bytes < len_bytes {
        return Err(SHORT_EXTENT_ERROR);
    }
    Ok(ImageFile::new(open_mapped(source, map, None)))
}

fn parse_extent_lines(text: &str) -> Result<Vec<ExtentLine<'_>>, Error> {
    const INVALID_DESCRIPTOR_ERROR: Error =
        Error::Damaged("VMDK: a description that cannot be understood");
    let mut lines = vec![];
    let mut all = 0u64;
    for line in text.lines() {
        let (Some(access), rest) = split_word(line) else { continue };
        match access {
            "RW" | "RDONLY" => {}
            "NOACCESS" => {
                return Err(
                    UnsupportedFeature::Feature("VMDK", "contents that must not be read").into()
                );
            }
            _ => continue,
        }
        let (sectors, rest) = split_word(rest);
        let sectors: u64 =
            sectors.and_then(|word| word.parse().ok()).ok_or(INVALID_DESCRIPTOR_ERROR)?;
        let (kind, rest) = split_word(rest);
        let quoted = || {
            rest.trim_start()
                .strip_prefix('"')
                .and_then(|it| it.split_once('"'))
                .ok_or(INVALID_DESCRIPTOR_ERROR)
        };
        let what = match kind {
            Some("ZERO") => ExtentKind::Zeros,
            Some("SPARSE") => ExtentKind::Sparse(quoted()?.0),
            // ESXi's name for the same; it omits the offset.
            Some("FLAT" | "VMFS") => {
                let (name, rest) = quoted()?;
                let at = split_word(rest).0.unwrap_or("0");
                ExtentKind::Flat(name, at.parse().map_err(|_| INVALID_DESCRIPTOR_ERROR)?)
            }
            Some("VMFSSPARSE" | "SESPARSE") => {
                let what = "its contents in a snapshot of ESXi (VMFSSPARSE or SESPARSE)";
                return Err(UnsupportedFeature::Feature("VMDK", what).into());
            }
            _ => {
                let what = "its contents in files of a kind that only ESX has, or on a device";
                return Err(UnsupportedFeature::Feature("VMDK", what).into());
            }
        };
        all = all
            .checked_add(sectors)
            .filter(|all| *all <= MAX_SECTORS)
            .ok_or(INVALID_DESCRIPTOR_ERROR)?;
        lines.push(ExtentLine { sectors, what });
        if lines.len() > MAX_EXTENTS {
            return Err(
                UnsupportedFeature::Feature("VMDK", "its contents in more than 64 files").into()
            );
        }
    }
    match lines.is_empty() {
        true => Err(INVALID_DESCRIPTOR_ERROR),
        false => Ok(lines),
    }
}

fn split_word(text: &str) -> (Option<&str>, &str) {
    let text = text.trim_start();
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let (word, rest) = text.split_at_checked(end).unwrap_or((text, ""));
    (Some(word).filter(|word| !word.is_empty()), rest)
}

impl<'a> ExtentKind<'a> {
    fn file_name(self) -> Option<&'a str> {
        match self {
            Self::Zeros => None,
            Self::Flat(name, _) | Self::Sparse(name) => Some(name),
        }
    }
}

/// Returns true if `head` is the start of a descriptor file.
pub(crate) fn is_descriptor_file(head: &[u8]) -> bool {
    strip_byte_order_mark(head).starts_with(DESCRIPTOR_FIRST_LINE)
}

fn strip_byte_order_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// Returns the text up to the first zero.
fn decode_descriptor(bytes: &[u8]) -> String {
    let text = strip_byte_order_mark(bytes).split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Lists the distinct file names of a descriptor in order, up to the first outside its directory.
/// An invalid descriptor has none.
pub fn extent_file_names(bytes: &[u8]) -> Vec<String> {
    let text = decode_descriptor(bytes);
    let lines = parse_extent_lines(&text).unwrap_or_default();
    let names = distinct_names(&lines).into_iter().take_while(|name| is_inside_directory(name));
    names.map(str::to_owned).collect()
}

/// Returns each name once, in order.
fn distinct_names<'a>(lines: &[ExtentLine<'a>]) -> Vec<&'a str> {
    let mut names = vec![];
    for name in lines.iter().filter_map(|line| line.what.file_name()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// Returns true if a name cannot lead out of a directory, except by symbolic links.
fn is_inside_directory(name: &str) -> bool {
    let path = Path::new(name);
    path.file_name().is_some()
        && !name.contains('\0')
        && path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
}

/// An extent of the disk.
struct ConcatenatedExtent {
    start_bytes: u64,
    len_bytes: u64,
    /// Contents; `None` for zeros.
    disk: Option<ImageFile>,
}

/// Consecutive extents.
struct ConcatenatedExtents(Vec<ConcatenatedExtent>);

impl ReadSource for ConcatenatedExtents {
    fn read_exact_at(&self, at_bytes: u64, into: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let at = at_bytes + done as u64;
            let nth = self.0.partition_point(|part| part.start_bytes + part.len_bytes <= at);
            let part = self.0.get(nth).ok_or(SHORT_EXTENT_ERROR)?;
            let skip = at - part.start_bytes;
            let len = rest.len().min(usize::try_from(part.len_bytes - skip).unwrap_or(usize::MAX));
            let Some(room) = rest.get_mut(..len) else { break };
            match &part.disk {
                Some(disk) => disk.read(skip, room)?,
                None => room.fill(0),
            }
            done += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use draconis_device::Random;
    use draconis_types::Block;

    use super::*;
    use crate::open;
    use crate::tests::{convert_with_qemu_img, memory_disk, read_all, sample_contents};

    const DESCRIPTOR_HEADER: &str = "# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\n";

    fn descriptor_disk(lines: &str) -> Arc<dyn Disk> {
        memory_disk(format!("{DESCRIPTOR_HEADER}{lines}\nddb.adapterType = \"ide\"\n").into_bytes())
    }

    fn open_error_of(lines: &str, given: &[Arc<dyn Disk>]) -> String {
        open(descriptor_disk(lines), given).err().unwrap().to_string()
    }

    #[test]
    #[ignore = "tools: qemu-img"]
    fn extents_are_concatenated_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let raw = sample_contents(1 << 20);
        let Some(sparse) = convert_with_qemu_img(dir.path(), &raw, &["-O", "vmdk"]) else { return };
        let given = [memory_disk(sparse), memory_disk(sample_contents(1 << 16))];
        let lines = "RW 2000 SPARSE \"a disk-s001.vmdk\"\nRW 7 ZERO\n\
                     RDONLY 100 FLAT \"a disk-f002.vmdk\" 3";
        let opened = open(descriptor_disk(lines), &given).unwrap();
        assert_eq!((opened.format, opened.session.is_none()), (Some(Format::VmdkText), true));
        let last = &sample_contents(1 << 16)[3 * 512..103 * 512];
        let expected = [&raw[..2000 * 512], &[0; 7 * 512], last].concat();
        assert!(read_all(&*opened.disk).unwrap() == expected);
        // The missing file is named.
        let told = open_error_of(lines, &given[..1]);
        assert!(told.contains("1 of 2") && told.contains("a disk-f002.vmdk"), "{told}");
        // A file that is too short, or not sparse, is an error.
        for swapped in [[1, 0], [1, 1], [0, 0]] {
            let given = swapped.map(|nth: usize| given[nth].clone());
            let read =
                open(descriptor_disk(lines), &given).map(|opened| read_all(&*opened.disk).is_ok());
            assert!(read.is_err() || swapped == [0, 0], "{swapped:?}");
        }
        assert!(open_error_of("RW 129 FLAT \"x-flat.vmdk\" 0", &given[1..]).contains("shorter"));
        assert!(open_error_of("RW 2049 SPARSE \"x-s001.vmdk\"", &given).contains("shorter"));
    }

    #[test]
    #[ignore = "tools: qemu-img"]
    fn esxi_flat_disks_match_qemu() {
        let dir = tempfile::tempdir().unwrap();
        let text = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                    createType=\"vmfs\"\nRW 128 VMFS \"x-flat.vmdk\"\n\
                    ddb.adapterType = \"lsilogic\"\n";
        let raw = sample_contents(1 << 16);
        for text in [text.to_owned(), text.replace('\n', "\r\n")] {
            std::fs::write(dir.path().join("x.vmdk"), &text).unwrap();
            std::fs::write(dir.path().join("x-flat.vmdk"), &raw).unwrap();
            let opened = open(memory_disk(text.into_bytes()), &[memory_disk(raw.clone())]).unwrap();
            let read = read_all(&*opened.disk).unwrap();
            let mut qemu = std::process::Command::new("qemu-img");
            qemu.args(["convert", "-O", "raw", "x.vmdk", "read"]).current_dir(dir.path());
            let Ok(output) = qemu.output() else {
                draconis_testkit::report_skipped("reading a VMDK of ESXi beside qemu-img needs it");
                return;
            };
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(read == raw && read == std::fs::read(dir.path().join("read")).unwrap());
        }
        let told = open_error_of("RW 128 VMFSSPARSE \"x-delta.vmdk\"", &[memory_disk(raw)]);
        assert!(told.contains("VMFSSPARSE"), "{told}");
    }

    #[test]
    fn extent_names_stay_inside_directory() {
        for name in ["/etc/passwd", "..", "../a.vmdk", "a/../../b.vmdk", "a/..", "", ".", "/"] {
            let line = format!("RW 8 FLAT \"{name}\" 0\n");
            let text =
                format!("{DESCRIPTOR_HEADER}RW 8 FLAT \"sub/a.img\" 0\n{line}RW 8 FLAT \"b\" 0\n");
            assert_eq!(extent_file_names(text.as_bytes()), ["sub/a.img"], "{name}");
            let told = open_error_of(&line, &[]);
            assert!(told.contains("is not opened") && told.contains("qemu-img convert"), "{told}");
            // A file that the user gives is read, whatever its name in the descriptor.
            assert!(
                open(descriptor_disk(&line), &[memory_disk(sample_contents(1 << 16))]).is_ok(),
                "{name}"
            );
        }
        assert_eq!(extent_file_names(b"RW 8 FLAT \"a"), [""; 0]);
    }

    #[test]
    #[ignore = "tools: qemu-img"]
    fn several_extents_of_one_file_match_qemu() {
        let dir = tempfile::tempdir().unwrap();
        let raw = sample_contents(1 << 16);
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("sub/a.img"), &raw).unwrap();
        for (first, second) in [(0, 64), (64, 0), (0, 0), (3, 10)] {
            let text = format!(
                "\u{feff}{DESCRIPTOR_HEADER}CID=fffffffe\ncreateType=\"twoGbMaxExtentFlat\"\n\
                 RW 64 FLAT \"sub/a.img\" {first}\nRW 64 FLAT \"sub/a.img\" {second}\n"
            );
            std::fs::write(dir.path().join("x.vmdk"), &text).unwrap();
            assert_eq!(extent_file_names(text.as_bytes()), ["sub/a.img"]);
            let opened = open(memory_disk(text.into_bytes()), &[memory_disk(raw.clone())]).unwrap();
            assert_eq!(opened.format, Some(Format::VmdkText));
            let read = read_all(&*opened.disk).unwrap();
            let mut qemu = std::process::Command::new("qemu-img");
            // qemu-img detects a descriptor with a byte order mark as raw unless -f names the
            // format.
            qemu.args(["convert", "-f", "vmdk", "-O", "raw", "x.vmdk", "read"]);
            let Ok(output) = qemu.current_dir(dir.path()).output() else {
                draconis_testkit::report_skipped("reading a VMDK beside qemu-img needs it");
                return;
            };
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(read == std::fs::read(dir.path().join("read")).unwrap(), "{first} {second}");
        }
    }

    #[test]
    fn invalid_descriptor_is_error() {
        let given = [memory_disk(sample_contents(1 << 16))];
        for lines in [
            "",
            "RW",
            "RW x FLAT \"a-flat.vmdk\" 0",
            "RW -1 ZERO",
            "RW 8 FLAT a-flat.vmdk 0",
            "RW 8 FLAT \"a-flat.vmdk",
            "RW 8 FLAT \"a-flat.vmdk\" x",
            "RW 8 FLAT \"a-flat.vmdk\" 18446744073709551615",
            "RW 18446744073709551615 ZERO",
            "RW 9007199254740992 ZERO\nRW 1 ZERO",
            "RW 8 VMFS \"a-flat.vmdk\" x",
            "RW 8 VMFS",
            "NOACCESS 8 ZERO",
            "RW 8 ZERO\nparentCID=12345678",
            &"RW 8 ZERO\n".repeat(65),
            &"#".repeat(MAX_DESCRIPTOR_BYTES as usize),
        ] {
            // The last of two lines counts.
            let text = format!("{}{lines}", DESCRIPTOR_HEADER.replace("parentCID=ffffffff\n", ""));
            assert!(open(memory_disk(text.into_bytes()), &given).is_err(), "{lines}");
        }
        let sound = format!("{DESCRIPTOR_HEADER}RW 64 FLAT \"a-f001.vmdk\" 0\nRW 9 ZERO\n");
        let mut random = Random::new(5);
        for _ in 0..2000 {
            let mut text = sound.clone().into_bytes();
            for _ in 0..=random.next_below(4) {
                let at = DESCRIPTOR_HEADER.len() - 10
                    + random.next_below((sound.len() - DESCRIPTOR_HEADER.len() + 10) as u64)
                        as usize;
                text[at] = b"0123456789 \n\"/\0\xFFRWx"[random.next_below(19) as usize];
            }
            if let Ok(opened) = open(memory_disk(text), &given) {
                let len = opened.disk.properties().len_bytes;
                let last = Extent::new(len.saturating_sub(512), 512.min(len));
                let block = Block::private(last.len_bytes as usize);
                let _ = opened.disk.read_now(last, block);
            }
        }
    }
}
