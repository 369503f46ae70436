//! Which partition of a disk holds what is looked for.

use draconis_device::{Disk, Extent, Partition, TableKind, partition_table};
use draconis_exchange::heap::Block;

use crate::signature::{self, Held};

/// What was found on a disk that holds no volume itself.
#[derive(Debug, Default)]
pub struct Parts {
    /// Partitions that hold an ext volume.
    pub volumes: Vec<Partition>,
    /// The others, with what they hold if that is known.
    pub others: Vec<(Partition, Option<Held>)>,
    /// The format of the partition table.
    pub kind: TableKind,
    /// Whether the table is the backup of a GPT whose first copy is damaged or gone.
    pub is_backup: bool,
}

impl Parts {
    /// All partitions in words: `1 (a FAT file system), 2 (an ext file system)`.
    pub fn shown(&self) -> String {
        let volumes = self.volumes.iter().map(|part| (part.number, Some("an ext file system")));
        let others = self.others.iter().map(|(part, held)| match held {
            None if part.extent.len_bytes == 0 => {
                (part.number, Some("behind the end of the disk, which is cut off"))
            }
            held => (part.number, held.map(|it| it.what)),
        });
        let mut all: Vec<_> = volumes.chain(others).collect();
        all.sort_unstable();
        let shown: Vec<String> = all
            .iter()
            .map(|(number, what)| format!("{number} ({})", what.unwrap_or("not known")))
            .collect();
        shown.join(", ")
    }
}

/// Looks at the partitions of a disk; `None` if it holds something itself, or has no table.
pub fn parts(disk: &dyn Disk) -> Option<Parts> {
    let own = signature::held(disk);
    if own.is_some_and(|own| own.what != signature::PARTITIONS) {
        return None;
    }
    let table = partition_table(disk).ok()?;
    let mut found = Parts { kind: table.kind, is_backup: table.is_backup, ..Parts::default() };
    for part in table.partitions {
        let held = head(disk, part.extent).as_deref().and_then(signature::of);
        match held {
            Some(held) if held.what == "an ext file system" => found.volumes.push(part),
            held => found.others.push((part, held)),
        }
    }
    (!found.volumes.is_empty() || !found.others.is_empty()).then_some(found)
}

/// The first bytes of a partition.
fn head(disk: &dyn Disk, part: Extent) -> Option<Vec<u8>> {
    let sector = u64::from(disk.properties().sector_bytes).max(1);
    let len = part.len_bytes.min(signature::HEAD_BYTES as u64) / sector * sector;
    let block = Block::private(len as usize);
    let read = disk.read_now(Extent::new(part.start_bytes, len), block).ok()?;
    Some(read.into_private().to_vec())
}
