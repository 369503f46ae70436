//! OVA archives: a tar of the description (`.ovf`) of a virtual machine and its disks.
//!
//! ```text
//!   | header: vm.ovf | its bytes | header: vm-disk1.vmdk | its bytes ──▶ a disk | ..
//! ```
//! Law 1: a bounded number of headers is read, and contents of only one member, the disk.
//! Law 2: nested archives are not opened.

use draconis_device::Extent;

use crate::image_file::ImageFile;
use crate::{Error, UnsupportedFeature};

const SECTOR_BYTES: u64 = 512;
/// Maximum headers that are read.
const MAX_MEMBERS: usize = 256;
/// Maximum names that are displayed.
const MAX_SHOWN_NAMES: usize = 16;
/// Magic number of an ext volume, which takes precedence.
const EXT_MAGIC: (u64, [u8; 2]) = (1080, [0x53, 0xEF]);
/// Extensions of disk names.
const DISK_SUFFIXES: [&str; 7] = [".vmdk", ".vhd", ".vhdx", ".vdi", ".qcow2", ".img", ".raw"];

/// Returns the only disk of the archive that begins with `head`; `None` if it is no OVA archive.
///
/// # Errors
/// [`UnsupportedFeature::Disks`] if there are several.
pub(crate) fn find_only_disk(file: &ImageFile, head: &[u8]) -> Result<Option<Extent>, Error> {
    if head.get(257..262) != Some(b"ustar") || is_ext_volume(file)? {
        return Ok(None);
    }
    let (members, is_whole) = list_members(file)?;
    let ends = |name: &str, ending: &str| {
        let at = name.len().checked_sub(ending.len()).and_then(|at| name.get(at..));
        at.is_some_and(|it| it.eq_ignore_ascii_case(ending))
    };
    if !members.iter().any(|member| ends(&member.name, ".ovf")) {
        return Ok(None);
    }
    if !is_whole {
        return Err(Error::Damaged("OVA: a member that ends behind the archive"));
    }
    let is_disk = |name: &str| DISK_SUFFIXES.iter().any(|ending| ends(name, ending));
    let disks: Vec<&TarMember> = members.iter().filter(|member| is_disk(&member.name)).collect();
    match disks[..] {
        [] => Ok(None),
        [only] => Ok(Some(only.extent)),
        [first, ..] => {
            let names = disks.iter().take(MAX_SHOWN_NAMES).map(|disk| format!("{:?}", disk.name));
            let names = names.collect::<Vec<_>>().join(", ");
            Err(UnsupportedFeature::Disks { names, first: first.name.clone() }.into())
        }
    }
}

fn is_ext_volume(file: &ImageFile) -> Result<bool, Error> {
    let (at, mark) = EXT_MAGIC;
    Ok(file.len_bytes() >= at + 2 && file.read_vec(at, 2)? == mark)
}

/// A regular file in the archive.
struct TarMember {
    name: String,
    extent: Extent,
}

/// Lists the regular files up to the first that exceeds the archive; the flag is false if there is
/// one.
fn list_members(file: &ImageFile) -> Result<(Vec<TarMember>, bool), Error> {
    let mut members = vec![];
    let mut at = 0u64;
    for _ in 0..MAX_MEMBERS {
        if at.checked_add(SECTOR_BYTES).is_none_or(|end| end > file.len_bytes()) {
            break;
        }
        let header = file.read_vec(at, SECTOR_BYTES as usize)?;
        if header.get(257..262) != Some(b"ustar") {
            break;
        }
        let len = parse_octal(header.get(124..136).unwrap_or_default());
        // Padded to whole sectors.
        let len = len.and_then(|len| len.checked_next_multiple_of(SECTOR_BYTES));
        let start_bytes = at + SECTOR_BYTES;
        let end = len.and_then(|len| start_bytes.checked_add(len));
        let Some(end) = end.filter(|end| *end <= file.len_bytes()) else {
            return Ok((members, false));
        };
        if matches!(header.get(156), Some(0 | b'0')) {
            let extent = Extent::new(start_bytes, end - start_bytes);
            members.push(TarMember { name: member_name(&header), extent });
        }
        at = end;
    }
    Ok((members, true))
}

/// Parses a number in octal digits, or in GNU tar's base-256 encoding.
fn parse_octal(field: &[u8]) -> Option<u64> {
    match field {
        [0x80, rest @ ..] => {
            let mut bytes = rest.iter();
            bytes.try_fold(0u64, |number, byte| Some(number.checked_mul(256)? | u64::from(*byte)))
        }
        field => {
            let text = std::str::from_utf8(field).ok()?;
            u64::from_str_radix(text.trim_matches(['\0', ' ']), 8).ok()
        }
    }
}

fn member_name(header: &[u8]) -> String {
    let text = |from: usize, to: usize| {
        let field = header.get(from..to).unwrap_or_default();
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        String::from_utf8_lossy(field.get(..end).unwrap_or_default()).into_owned()
    };
    let is_posix = header.get(262) == Some(&0);
    match text(345, 500) {
        prefix if is_posix && !prefix.is_empty() => format!("{prefix}/{}", text(0, 100)),
        _ => text(0, 100),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use draconis_device::Random;
    use draconis_types::Block;

    use crate::tests::{convert_with_qemu_img, memory_disk, read_all, sample_contents};
    use crate::{Format, open, open_for_writing};

    /// Builds an archive of a machine with disks of these names and lengths.
    fn build_ova(disks: &[(&str, u64)], format: &str) -> Option<Vec<u8>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("vm.ovf"), "<Envelope/>").unwrap();
        for (name, len) in disks {
            let options = ["-O", "vmdk", "-o", "subformat=streamOptimized"];
            let image =
                convert_with_qemu_img(dir.path(), &sample_contents(*len as usize), &options)?;
            std::fs::write(dir.path().join(name), image).unwrap();
        }
        let names = disks.iter().map(|(name, _)| *name);
        let mut tar = Command::new("tar");
        tar.args([&format!("--format={format}"), "-cf", "vm.ova", "vm.ovf"]).args(names);
        let Ok(output) = tar.current_dir(dir.path()).output() else {
            draconis_testkit::report_skipped("OVA archives need tar");
            return None;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(std::fs::read(dir.path().join("vm.ova")).unwrap())
    }

    #[test]
    #[ignore = "tools: qemu-img"]
    fn ova_disk_is_read_in_place() {
        for format in ["ustar", "gnu", "pax"] {
            let Some(archive) = build_ova(&[("vm-disk1.vmdk", 1 << 20)], format) else { return };
            let opened = open(memory_disk(archive.clone()), &[]).unwrap();
            assert_eq!(opened.format, Some(Format::Ova));
            assert!(read_all(&*opened.disk).unwrap() == sample_contents(1 << 20));
            let opened = open_for_writing(memory_disk(archive), &[], 1).unwrap();
            assert!(opened.session.is_none() && opened.disk.properties().read_only);
        }
        let Some(archive) = build_ova(&[("a.vmdk", 1 << 16), ("b.vmdk", 1 << 16)], "ustar") else {
            return;
        };
        let told = open(memory_disk(archive), &[]).err().unwrap().to_string();
        assert!(told.contains("\"a.vmdk\", \"b.vmdk\"") && told.contains("tar -xf"), "{told}");
    }

    #[test]
    #[ignore = "tools: qemu-img"]
    fn truncated_archive_is_error() {
        let Some(archive) = build_ova(&[("vm-disk1.vmdk", 1 << 20)], "ustar") else { return };
        let told = open(memory_disk(archive[..20 << 10].to_vec()), &[]).err().unwrap().to_string();
        assert!(told.contains("ends behind the archive"), "{told}");
    }

    #[test]
    #[ignore = "tools: qemu-img"]
    fn corrupt_archive_does_not_panic() {
        let Some(archive) = build_ova(&[("vm-disk1.vmdk", 1 << 16)], "gnu") else { return };
        let mut random = Random::new(7);
        for _ in 0..2000 {
            let mut broken = archive.clone();
            for _ in 0..=random.next_below(3) {
                let at = [0, 1024][random.next_below(2) as usize] + random.next_below(512) as usize;
                broken[at] = [0, 0x80, 0xFF, b'7', random.next_below(256) as u8]
                    [random.next_below(5) as usize];
            }
            broken.truncate(broken.len() - 512 * random.next_below(8) as usize);
            if let Ok(opened) = open(memory_disk(broken), &[]) {
                let len = opened.disk.properties().len_bytes.min(512);
                let extent = draconis_device::Extent::new(0, len);
                let _ = opened.disk.read_now(extent, Block::private(len as usize));
            }
        }
    }
}
