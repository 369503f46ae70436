//! Random calls. Acknowledged changes are not tracked; the check is only that files contain no
//! foreign data.

use draconis_ext::{InodeNumber, NewNode, RenameMode, Reserve, Volume, Whiteout, XattrSet};
use draconis_types::{AttributeChange, FileType};

use super::{
    RecordingDisk, Workload, create, decode_cell, encode_cells, read_file, walk_volume, write,
};
use draconis_device::Random;

pub(super) struct RandomWorkload {
    steps: u64,
}

impl RandomWorkload {
    pub(super) fn new(steps: u64) -> Self {
        Self { steps }
    }
}

/// Existing names: directory, name, and node.
type NamedNodes = Vec<(InodeNumber, String, KnownNode)>;

#[derive(Clone, Copy)]
struct KnownNode {
    inode: InodeNumber,
    owner: u32,
    is_directory: bool,
}

impl Workload for RandomWorkload {
    fn name(&self) -> &'static str {
        "anything"
    }

    fn may_fill_volume(&self) -> bool {
        true
    }

    fn run(&self, volume: &Volume, _: &RecordingDisk, dice: &mut Random) -> anyhow::Result<()> {
        let mut names: NamedNodes = vec![];
        for step in 0..self.steps * 2 {
            // The volume or a directory may be full: the call then changes nothing.
            if let Err(error) = random_change(volume, step, dice, &mut names)
                && error.downcast_ref::<draconis_ext::Error>().is_none()
            {
                return Err(error);
            }
            match dice.next_below(12) {
                0 => volume.sync()?,
                1 | 2 => volume.commit()?,
                _ => {}
            }
        }
        Ok(())
    }

    fn verify(&self, volume: &Volume, _: &[u64]) -> Result<(), String> {
        for (path, inode, kind) in walk_volume(volume)? {
            if kind != FileType::File {
                continue;
            }
            let bytes = read_file(volume, inode)?;
            let mut owner = None;
            for (bytes, nth) in bytes.chunks_exact(16).zip(0..) {
                let found = decode_cell(bytes, nth).map_err(|error| format!("{path}: {error}"))?;
                let Some((found, _)) = found else { continue };
                if *owner.get_or_insert(found) != found {
                    return Err(format!("{path} shows cells of {owner:?} and of {found}"));
                }
            }
        }
        Ok(())
    }
}

fn random_change(
    volume: &Volume,
    step: u64,
    dice: &mut Random,
    names: &mut NamedNodes,
) -> anyhow::Result<()> {
    let mut dirs: Vec<InodeNumber> = vec![InodeNumber::ROOT];
    dirs.extend(names.iter().filter(|it| it.2.is_directory).map(|it| it.2.inode));
    let dir = dirs[dice.next_below(dirs.len() as u64) as usize];
    let new = format!("{step} {}", "n".repeat(dice.next_below(60) as usize));
    let what = dice.next_below(18);
    let nth = dice.next_below(names.len().max(1) as u64) as usize;
    if names.is_empty() || what < 4 {
        let is_directory = what == 0;
        let kind = if is_directory { FileType::Directory } else { FileType::File };
        let inode = create(volume, dir, &new, kind)?;
        names.push((dir, new, KnownNode { inode, owner: step as u32 + 1, is_directory }));
        return Ok(());
    }
    let (parent, name, node) = names[nth].clone();
    match what {
        4..8 if !node.is_directory => {
            let at = dice.next_below(60_000) / 16 * 16;
            let len = 16 + dice.next_below(9_000) / 16 * 16;
            write(volume, node.inode, at, &encode_cells(node.owner, step as u32, at, len))?;
        }
        8 | 9 if node.is_directory => {
            volume.remove_directory(parent, name.as_bytes())?;
            names.swap_remove(nth);
        }
        8 | 9 => {
            volume.unlink(parent, name.as_bytes())?;
            names.swap_remove(nth);
        }
        10 | 11 => {
            // Directories stay in their parent: a move cannot be made in one sector.
            let to = if node.is_directory { parent } else { dir };
            volume.rename(parent, name.as_bytes(), to, new.as_bytes(), RenameMode::Replace)?;
            names[nth] = (to, new, node);
        }
        12 if !node.is_directory => {
            let size_bytes = Some(dice.next_below(70_000) / 16 * 16);
            let change = AttributeChange { size_bytes, ..AttributeChange::default() };
            volume.set_attributes(node.inode, &change)?;
        }
        13 if !node.is_directory => {
            volume.link(node.inode, dir, new.as_bytes())?;
            names.push((dir, new, node));
        }
        14 => {
            let value = vec![b'v'; dice.next_below(400) as usize];
            volume.set_xattr(node.inode, b"user.note", &value, XattrSet::Any, false)?;
        }
        15 if !node.is_directory => {
            let (at, len) =
                (dice.next_below(60_000) / 16 * 16, 16 + dice.next_below(8_000) / 16 * 16);
            let how = match dice.next_below(3) {
                0 => Reserve::Allocate,
                1 => Reserve::PunchHole,
                _ => Reserve::ZeroRange { keep_size: false },
            };
            volume.fallocate(node.inode, at, len, how)?;
        }
        16 => {
            let file = create_orphan(volume, dir, step, dice)?;
            let named = dice.next_below(3) > 0 && volume.link(file, dir, new.as_bytes()).is_ok();
            volume.remove_users(file, 1);
            if named {
                let node = KnownNode { inode: file, owner: step as u32 + 1, is_directory: false };
                names.push((dir, new, node));
            }
        }
        17 => {
            let to = if node.is_directory { parent } else { dir };
            let whiteout = Whiteout { uid: 0, gid: 0 };
            let (name, how) = (name.as_bytes(), RenameMode::Replace);
            volume.rename_with_whiteout(parent, name, to, new.as_bytes(), how, whiteout)?;
            names[nth] = (to, new, node);
        }
        _ => {}
    }
    Ok(())
}

/// Creates an orphan file with some data, on the disk already or not.
fn create_orphan(
    volume: &Volume,
    dir: InodeNumber,
    step: u64,
    dice: &mut Random,
) -> anyhow::Result<InodeNumber> {
    let (kind, mode) = (FileType::File, 0o600);
    let new = NewNode { kind, mode, uid: 0, gid: 0, device: (0, 0), target: &[] };
    let file = volume.create_tmpfile(dir, &new)?;
    volume.add_user(file);
    let len = 16 + dice.next_below(9_000) / 16 * 16;
    write(volume, file, 0, &encode_cells(step as u32 + 1, step as u32, 0, len)).or_else(
        |error| {
            // A full volume changes nothing.
            error.downcast_ref::<draconis_ext::Error>().map(drop).ok_or(error)
        },
    )?;
    match dice.next_below(3) {
        0 => volume.sync()?,
        1 => volume.commit()?,
        _ => {}
    }
    Ok(file)
}
