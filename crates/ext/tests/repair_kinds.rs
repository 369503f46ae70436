//! Kinds of damage, each made by debugfs: the repair mends it, check and `e2fsck -fn` are silent, and
//! every file and link is there with its bytes.

use draconis_ext::check::{CheckOptions, What, check};
use draconis_ext::repair::{Verdict, plan};
use draconis_ext::{FileType, InodeNumber, OpenOptions, Volume};

use crate::check_features::repairs::{Contents, readable_files, worse_files};
use crate::common::Image;
use crate::common::offline::disk_of;
use crate::common::repairing::{self, Repaired, repair};

const EXT2: &[&str] = &["-t", "ext2", "-b", "1024"];
const EXT4: &[&str] = &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum"];
const BIGALLOC: &[&str] =
    &["-t", "ext4", "-b", "1024", "-C", "4096", "-O", "bigalloc,^metadata_csum,^resize_inode"];
const INLINE: &[&str] = &["-t", "ext4", "-b", "1024", "-O", "inline_data,^metadata_csum"];

/// Returns a volume of one group with 40 files, links and a directory, changed by these requests.
fn damaged(arguments: &[&str], requests: &[&str]) -> Option<Image> {
    let source = tempfile::tempdir().unwrap();
    let path = |name: &str| source.path().join(name);
    for nth in 0..40 {
        std::fs::write(path(&format!("file {nth}")), vec![nth + 1; 3000]).unwrap();
    }
    std::fs::create_dir(path("dir")).unwrap();
    std::fs::write(path("dir/inside"), "Dear reader,\n").unwrap();
    std::fs::write(path("tail"), [b'x'; 90]).unwrap();
    std::os::unix::fs::symlink("short", path("link")).unwrap();
    std::os::unix::fs::symlink("t".repeat(1000), path("long link")).unwrap();
    let image = Image::make(Some(source.path()), "6M", arguments)?;
    for request in requests {
        image.debugfs_write(request)?;
    }
    Some(image)
}

fn bytes_of(image: &Image) -> Vec<u8> {
    std::fs::read(&image.path).unwrap()
}

/// Repairs a volume, which must be damaged, and returns its bytes; no file of `before` is worse.
fn mended(bytes: &[u8], before: &Contents) -> Vec<u8> {
    let found = check(&disk_of(bytes), CheckOptions::default(), &|_, _| {});
    assert!(found.is_ok_and(|it| !it.is_clean()), "not damaged");
    match repair(bytes) {
        Ok(Repaired::Whole(repaired)) => {
            assert_eq!(worse_files(before, &readable_files(&repaired)), [""; 0]);
            repaired
        }
        Ok(Repaired::Left(why)) => panic!("left: {why}"),
        Err(why) => panic!("{why}"),
    }
}

fn targets(bytes: &[u8], names: &[&str]) -> Vec<Vec<u8>> {
    let volume = Volume::open(disk_of(bytes), OpenOptions::default()).unwrap();
    let target = |name: &&str| {
        let inode = volume.lookup(volume.root(), name.as_bytes()).unwrap();
        assert_eq!(volume.attributes(inode).unwrap().kind, FileType::Symlink);
        volume.read_link(inode).unwrap()
    };
    names.iter().map(target).collect()
}

#[test]
fn misplaced_bitmaps_get_other_blocks() {
    for arguments in [EXT2, &["-t", "ext4", "-b", "1024"]] {
        for field in ["block_bitmap", "inode_bitmap"] {
            let Some(sound) = damaged(arguments, &[]) else { return };
            let before = readable_files(&bytes_of(&sound));
            let request = format!("set_bg 0 {field} 900000");
            let Some(image) = damaged(arguments, &[&request, "set_bg 0 checksum calc"]) else {
                return;
            };
            let repaired = mended(&bytes_of(&image), &before);
            assert_eq!(readable_files(&repaired).len(), before.len());
        }
    }
}

/// Half of all inodes are on a list of orphans that makes no sense, and whole.
#[test]
fn broken_list_of_orphans_is_no_damaged_table() {
    let on_list: Vec<String> =
        (0..30).map(|nth| format!("sif \"/file {nth}\" dtime @{}", nth + 20)).collect();
    let on_list: Vec<&str> = on_list.iter().map(String::as_str).collect();
    let Some(sound) = damaged(EXT2, &[]) else { return };
    let before = readable_files(&bytes_of(&sound));
    let image = damaged(EXT2, &on_list).unwrap();
    assert_eq!(readable_files(&mended(&bytes_of(&image), &before)), before);
}

#[test]
fn directory_without_blocks_is_cleared() {
    let requests =
        ["unlink /dir/inside", "sif /dir size 0", "sif /dir block[0] 0", "sif /dir blocks 0"];
    let Some(image) = damaged(EXT2, &requests) else { return };
    let bytes = bytes_of(&image);
    let before = readable_files(&bytes);
    assert!(before.len() > 40);
    mended(&bytes, &before);
}

#[test]
fn pointers_with_one_wrong_value_are_one_problem() {
    let pointers: Vec<String> =
        (3..12).map(|nth| format!("sif \"/file 7\" block[{nth}] 4294901760")).collect();
    let pointers: Vec<&str> = pointers.iter().map(String::as_str).collect();
    let Some(sound) = damaged(EXT2, &[]) else { return };
    let before = readable_files(&bytes_of(&sound));
    let image = damaged(EXT2, &pointers).unwrap();
    mended(&bytes_of(&image), &before);
}

#[test]
fn targets_of_links_are_kept() {
    let names = ["link", "long link"];
    let right = [b"short".to_vec(), vec![b't'; 1000]];
    // A tree by the flag alone; attributes in a block that is none, beside a target inside.
    for (arguments, requests) in [
        (EXT4, &["sif /link flags 0x80000"][..]),
        (EXT2, &["sif /link file_acl 99999999", "sif /link blocks 2"]),
    ] {
        let Some(image) = damaged(arguments, requests) else { return };
        let bytes = bytes_of(&image);
        assert_eq!(targets(&mended(&bytes, &Contents::new()), &names), right, "{requests:?}");
    }
    // A target with bytes behind its end instead of a NUL.
    let Some(image) = damaged(EXT2, &[]) else { return };
    let mut bytes = bytes_of(&image);
    let place = image.debugfs("blocks \"/long link\"").unwrap();
    let at = place.trim().parse::<usize>().unwrap() * 1024;
    bytes[at + 1000..at + 1024].fill(b'!');
    assert_eq!(targets(&mended(&bytes, &Contents::new()), &names), right);
}

#[test]
fn contents_inside_an_inode_outlive_its_other_attributes() {
    let set = ["ea_set /tail user.a Reader"];
    let Some(image) = damaged(INLINE, &set) else { return };
    let place = image.debugfs("imap /tail").unwrap();
    let number = |after: &str| {
        let rest = place.split(after).nth(1).unwrap();
        let digits: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
        usize::from_str_radix(
            digits.trim_start_matches("0x"),
            if digits.starts_with("0x") { 16 } else { 10 },
        )
        .unwrap()
    };
    let slot = number("at block ") * 1024 + number("offset ");
    let mut bytes = bytes_of(&image);
    let before = readable_files(&bytes);
    // Both values at one place.
    let list = slot + 128 + 32 + 4;
    let place = bytes[list + 2..list + 4].to_vec();
    let second = list + 20;
    bytes[second + 2..second + 4].copy_from_slice(&place);
    let repaired = mended(&bytes, &Contents::new());
    assert_eq!(readable_files(&repaired).get(&b"/tail"[..]), before.get(&b"/tail"[..]));
}

#[test]
fn directory_inside_an_inode_without_room_gets_blocks() {
    let Some(image) = damaged(INLINE, &["sif /dir extra_isize 0"]) else { return };
    let bytes = bytes_of(&image);
    let repaired = mended(&bytes, &readable_files(&bytes));
    assert!(readable_files(&repaired).contains_key(&b"/dir/inside"[..]));
}

#[test]
fn quota_inodes_that_do_not_exist_are_replaced() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "quota,^metadata_csum"];
    let requests = ["ssv usr_quota_inum 808464432", "ssv grp_quota_inum 808464432"];
    let Some(image) = damaged(&arguments, &requests) else { return };
    let bytes = bytes_of(&image);
    mended(&bytes, &readable_files(&bytes));
}

#[test]
fn descriptors_grow_in_one_way() {
    let Some(image) = damaged(EXT2, &["feature meta_bg"]) else { return };
    let bytes = bytes_of(&image);
    mended(&bytes, &readable_files(&bytes));
}

/// Linux does not mount a volume with such a number.
#[test]
fn first_meta_group_is_among_the_descriptors() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode,^metadata_csum"];
    let Some(image) = damaged(&arguments, &["ssv first_meta_bg 2"]) else { return };
    let bytes = bytes_of(&image);
    mended(&bytes, &readable_files(&bytes));
}

#[test]
fn backup_of_revision_0_is_used() {
    let Some(image) = Image::make(None, "12M", &["-r", "0", "-b", "1024"]) else { return };
    let mut bytes = bytes_of(&image);
    bytes[1024..2048].fill(0);
    assert!(Volume::open(disk_of(&bytes), OpenOptions::default()).is_err());
    assert!(matches!(repair(&bytes), Ok(Repaired::Whole(_))));
}

#[test]
fn blocks_in_clusters_are_copied() {
    let Some(sound) = damaged(BIGALLOC, &[]) else { return };
    let before = readable_files(&bytes_of(&sound));
    let block = |name: &str| -> u64 {
        let all = sound.debugfs(&format!("blocks \"/{name}\"")).unwrap();
        all.split_whitespace().next().unwrap().parse().unwrap()
    };
    let (one, other) = (block("file 3"), block("file 4"));
    // The cluster of another file; and a block in the wrong place of its own cluster.
    for place in [other, one + 1] {
        let request = format!("sif \"/file 3\" block[5] {place}");
        let image = damaged(BIGALLOC, &[&request]).unwrap();
        let mut others = before.clone();
        others.remove(&b"/file 3"[..]);
        mended(&bytes_of(&image), &others);
    }
}

/// A lost journal, on a volume without free blocks for one.
#[test]
fn full_volume_is_repaired_without_a_journal() {
    let source = tempfile::tempdir().unwrap();
    std::fs::write(source.path().join("large"), vec![7; 2 << 20]).unwrap();
    let arguments = ["-t", "ext3", "-b", "1024"];
    let Some(image) = Image::make(Some(source.path()), "4M", &arguments) else { return };
    image.debugfs_write("ssv jnl_backup_type 0").unwrap();
    image.debugfs_write("clri <8>").unwrap();
    let bytes = bytes_of(&image);
    let repaired = mended(&bytes, &readable_files(&bytes));
    let volume = Volume::open(disk_of(&repaired), OpenOptions::default()).unwrap();
    assert!(volume.attributes(InodeNumber(8)).is_err());
}

/// Without free blocks for copies of shared ones, the other problems are repaired.
#[test]
fn problems_are_repaired_beside_those_without_room() {
    let source = tempfile::tempdir().unwrap();
    let large = |bytes: usize| {
        std::fs::write(source.path().join("large"), vec![7; bytes]).unwrap();
        std::fs::write(source.path().join("other"), vec![8; 3000]).unwrap();
        Image::make(Some(source.path()), "1M", EXT2)
    };
    let Some(image) = large(10_000) else { return };
    let report = check(&disk_of(&bytes_of(&image)), CheckOptions::default(), &|_, _| {}).unwrap();
    let free = (report.blocks - report.used_blocks) as usize;
    let image = large((free - 6) * 1024).unwrap();
    let own = image.debugfs("blocks /large").unwrap();
    let shared: Vec<&str> = own.split_whitespace().take(12).collect();
    for (nth, block) in shared.iter().enumerate() {
        image.debugfs_write(&format!("sif /other block[{nth}] {block}")).unwrap();
    }
    image.debugfs_write("sif /large links_count 3").unwrap();
    let bytes = bytes_of(&image);
    let before = readable_files(&bytes);
    let disk = disk_of(&bytes);
    let repair = plan(&disk, &repairing::options(), &|_, _| {}).unwrap();
    assert_eq!(repair.verdict(), Verdict::InPart, "{:?}", repair.unfixed);
    let left: Vec<What> = repair.unfixed.iter().map(|it| it.what).collect();
    assert!(left.contains(&What::ClaimedTwice) && !left.contains(&What::LinkCount), "{left:?}");
    let is_left = |problem| repair.unfixed.contains(problem);
    assert!(!repair.fixes.iter().any(|fix| is_left(&fix.problem)));
    let scratch = tempfile::tempfile().unwrap();
    repair.write(&disk, None, Some(scratch)).unwrap();
    let volume = Volume::open(disk.clone(), OpenOptions::default()).unwrap();
    let node = volume.lookup(volume.root(), b"large").unwrap();
    assert_eq!(volume.attributes(node).unwrap().links, 1);
    let mut found = vec![0; 1000];
    assert_eq!(volume.read_into(node, 0, &mut found), Ok(1000));
    assert!(before.contains_key(&b"/large"[..]) && found.iter().all(|byte| *byte == 7));
}
