//! Repairs of the corrupted volumes: check and `e2fsck -fn` are silent after one run, and every
//! file that could be read before is there with its bytes.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use draconis_ext::{FileType, InodeNumber, OpenOptions, Volume};

use crate::check_features::{
    LINES_TO_CORRUPT, build_base_volumes, check_corrupted_volumes, plants,
};
use crate::common::offline::disk_of;
use crate::common::readable_names;
use crate::common::repairing::{Repaired, repair};
use crate::common::spoil::scaled_rounds;

/// Files and links by their paths.
pub type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

/// Bytes of a file that are compared: damage makes some large.
const MAX_READ_BYTES: u64 = 1 << 20;
const MAX_DEPTH: usize = 12;

/// Reads all that can be read.
pub fn readable_files(bytes: &[u8]) -> Contents {
    let mut found = Contents::new();
    if let Ok(volume) = Volume::open(disk_of(bytes), OpenOptions::default()) {
        read_tree(&volume, InodeNumber::ROOT, b"", 0, &mut found);
    }
    found
}

fn read_tree(volume: &Volume, dir: InodeNumber, path: &[u8], depth: usize, into: &mut Contents) {
    for (name, inode) in readable_names(volume, dir) {
        let path = [path, b"/", &name].concat();
        let Ok(node) = volume.inode(inode) else { continue };
        match node.kind {
            FileType::Directory if depth < MAX_DEPTH => {
                read_tree(volume, inode, &path, depth + 1, into);
            }
            FileType::File => {
                let mut bytes = vec![0; node.size_bytes.min(MAX_READ_BYTES) as usize];
                if volume.read_into(inode, 0, &mut bytes) == Ok(bytes.len()) {
                    into.insert(path, bytes);
                }
            }
            _ => {}
        }
    }
}

/// Returns the files that are worse after a repair.
pub fn worse_files(before: &Contents, after: &Contents) -> Vec<String> {
    // Sizes that made no sense change, and what is behind the contents are zeros.
    let agrees = |long: &[u8], short: &[u8]| {
        long.strip_prefix(short).is_some_and(|rest| rest.iter().all(|byte| *byte == 0))
    };
    let is_kept = |bytes: &Vec<u8>, now: Option<&Vec<u8>>| {
        now.is_some_and(|it| it.starts_with(bytes) || agrees(bytes, it))
    };
    let lost = before.iter().filter(|(path, bytes)| {
        let moved = || after.values().any(|now| now.starts_with(bytes));
        !is_kept(bytes, after.get(*path)) && !moved()
    });
    lost.map(|(path, _)| path.escape_ascii().to_string()).collect()
}

#[test]
fn planted_problems_are_repaired() {
    let mut lines: Vec<&str> = plants::PLANTED_PROBLEMS.iter().map(|(line, ..)| *line).collect();
    lines.dedup();
    let bases = build_base_volumes(&lines);
    let mut wrong = Vec::new();
    for (line, what, plant) in plants::PLANTED_PROBLEMS {
        let Some(base) = bases.iter().find(|base| base.line == *line) else { continue };
        let mut changed = plants::PlantingImage { base, image: base.image.clone() };
        plant(&mut changed);
        let before = readable_files(&changed.image);
        match repair(&changed.image) {
            Ok(Repaired::Whole(bytes)) => {
                let worse = worse_files(&before, &readable_files(&bytes));
                if !worse.is_empty() {
                    wrong.push(format!("{line}: {what:?}: worse: {worse:?}"));
                }
            }
            Ok(Repaired::Left(why)) => wrong.push(format!("{line}: {what:?}: not repaired: {why}")),
            Err(why) => wrong.push(format!("{line}: {what:?}: {why}")),
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
#[ignore = "long: a minute: hundreds of volumes"]
fn corrupted_volumes_are_repaired() {
    let rounds = scaled_rounds(150);
    let left = Mutex::new(BTreeMap::<String, u64>::new());
    let unseen = AtomicU64::new(0);
    let odd = check_corrupted_volumes(LINES_TO_CORRUPT, 0x4E9A, rounds, |volume| {
        let (line, before) = (&volume.base.line, readable_files(&volume.image));
        match repair(&volume.image) {
            Ok(Repaired::Whole(bytes)) => {
                let worse = worse_files(&before, &readable_files(&bytes));
                (!worse.is_empty()).then(|| format!("worse: {worse:?}"))
            }
            Ok(Repaired::Left(why)) => {
                *left.lock().unwrap().entry(format!("{why} ({line})")).or_default() += 1;
                None
            }
            // What our check does not see has no fix: one volume in some hundreds.
            Err(why) if why.contains("e2fsck says") => {
                eprintln!("seed {}, {line}: {why}", volume.seed);
                unseen.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(why) => Some(why),
        }
    });
    let Some(odd) = odd else { return };
    let left = left.into_inner().unwrap();
    let refused: u64 = left.values().sum();
    eprintln!("{rounds} volumes, {refused} without a whole repair: {left:#?}");
    assert!(odd.is_empty(), "{} of {rounds}:\n{}", odd.len(), odd.join("\n"));
    let unseen = unseen.into_inner();
    assert!(unseen <= rounds / 50, "e2fsck finds more on {unseen} of {rounds} repaired volumes");
    assert!(refused <= rounds / 3, "{refused} of {rounds} are not repaired");
}

/// Prints one table: the same volumes repaired by us and by `e2fsck -fy`.
#[test]
#[ignore = "by hand: compares with e2fsck -fy for minutes: DRACONIS_ROUNDS, DRACONIS_SEED"]
fn by_hand_repairs_beside_e2fsck() {
    // Damaged volumes; then of each tool: silent after one run, with files that are worse, and
    // these files; and those that we leave as they are.
    let tally = Mutex::new([0u64; 8]);
    let wrong = check_corrupted_volumes(LINES_TO_CORRUPT, 0x4E9A, scaled_rounds(150), |volume| {
        let image = volume.image;
        let dir = crate::matrix::made::scratch_dir();
        let path = dir.path().join("image");
        std::fs::write(&path, &image).unwrap();
        if crate::check_features::e2fsck(&path).0 {
            return None;
        }
        let before = readable_files(&image);
        let (mut ours, mut left, mut our_worse) = (0, 0, 0);
        match repair(&image) {
            Ok(Repaired::Whole(bytes)) => {
                ours = 1;
                our_worse = worse_files(&before, &readable_files(&bytes)).len() as u64;
            }
            Ok(Repaired::Left(_)) => left = 1,
            Err(_) => {}
        }
        draconis_testkit::judge::e2fsck("-fy", &path);
        let theirs = u64::from(crate::check_features::e2fsck(&path).0);
        let worse = worse_files(&before, &readable_files(&std::fs::read(&path).unwrap())).len();
        let worse = worse as u64;
        let found = [1, ours, our_worse.min(1), our_worse, left, theirs, worse.min(1), worse];
        tally.lock().unwrap().iter_mut().zip(found).for_each(|(sum, it)| *sum += it);
        None
    });
    assert_eq!(wrong.unwrap_or_default(), [""; 0]);
    let [all, ours, our_volumes, our_files, left, theirs, volumes, files] =
        tally.into_inner().unwrap();
    eprintln!("{all} damaged volumes        draconis repair -y   e2fsck -fy");
    eprintln!("silent after one run   {ours:19}  {theirs:11}");
    eprintln!("left as it is          {left:19}  {:11}", 0);
    eprintln!("with files made worse  {our_volumes:19}  {volumes:11}");
    eprintln!("files made worse       {our_files:19}  {files:11}");
}
