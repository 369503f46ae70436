//! Directory entries packed into a block.
//!
//! ```text
//!   | len u16 | cookie u64 | node u64 | kind u8 | name len u8, bytes | 0 |
//!   | len u16 | cookie u64 | node u64 | kind u8 | name len u8, bytes | 1, attributes | ..
//! ```
//!
//! The decoder reads a private copy and trusts nothing: it ends with a [`Violation`] at the first
//! record that the encoder would not write.

use crate::{
    contract::wire::{
        ExportAttachments, Field, ImportAttachments, MAX_MESSAGE_BYTES, Packer, Unpacker, Violation,
    },
    heap::arena::BlockName,
};
use draconis_types::{Attributes, Block, FileType, Name, Node};

/// One directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Position for `Enumerate` to continue after the entry.
    pub cookie: u64,
    /// Node that the name refers to.
    pub node: Node,
    /// Its type, if the directory records it.
    pub kind: Option<FileType>,
    /// The name.
    pub name: Name,
    /// Its attributes, if requested.
    pub attributes: Option<Attributes>,
}

impl Field for DirEntry {
    const TYPE_HASH: u64 = crate::contract::fsm::type_hash("Entry", &[Attributes::TYPE_HASH]);
    const MAX_BYTES: usize =
        16 + <Option<FileType>>::MAX_BYTES + Name::MAX_BYTES + <Option<Attributes>>::MAX_BYTES;
    fn pack(self, into: &mut Packer<'_>) {
        self.cookie.pack(into);
        self.node.pack(into);
        into.put(&[self.kind.map_or(0, |kind| kind as u8)]);
        self.name.pack(into);
        self.attributes.pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(Self {
            cookie: Field::unpack(from)?,
            node: Field::unpack(from)?,
            kind: match u8::unpack(from)? {
                0 => None,
                n => Some(FileType::from_number(n.into()).ok_or(Violation::Value("Kind"))?),
            },
            name: Field::unpack(from)?,
            attributes: Field::unpack(from)?,
        })
    }
}

/// Writes entries into the block of an `Enumerate`.
#[derive(Debug)]
pub struct EntryWriter<'a> {
    block: &'a mut Block,
    used: usize,
}

impl<'a> EntryWriter<'a> {
    /// Creates a writer at the start of `block`.
    pub fn new(block: &'a mut Block) -> Self {
        Self { block, used: 0 }
    }

    /// Appends `entry`; returns `false` and writes nothing if it does not fit.
    pub fn push(&mut self, entry: &DirEntry) -> bool {
        let mut line = [0; MAX_MESSAGE_BYTES];
        let mut attachments = NoAttachments;
        let mut packer = Packer::new(&mut line, &mut attachments);
        packer.put(&[0, 0]);
        entry.clone().pack(&mut packer);
        let len = packer.used();
        if len > self.block.len() - self.used {
            return false;
        }
        // An entry takes a few hundred bytes at most.
        line[..2].copy_from_slice(&(len as u16).to_le_bytes());
        self.used += self.block.copy_in(self.used, &line[..len]);
        true
    }

    /// Returns the number of bytes written so far: `AckEnumerate::len`.
    pub fn len(&self) -> u32 {
        // Blocks in messages are shorter than 4 GiB.
        self.used as u32
    }

    /// Returns true if nothing was written.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }
}

/// Reads the entries of an `AckEnumerate`.
#[derive(Debug)]
pub struct EntryReader {
    bytes: Vec<u8>,
    at: usize,
}

impl EntryReader {
    /// Creates a reader over a copy of the first `len` bytes of `block`.
    ///
    /// # Errors
    /// [`Violation::Length`] when the block is shorter.
    pub fn new(block: &Block, len: u32) -> Result<Self, Violation> {
        let wanted = len as usize;
        if wanted > block.len() {
            return Err(Violation::Length(len));
        }
        let mut bytes = vec![0; wanted];
        block.copy_out(0, &mut bytes);
        Ok(Self { bytes, at: 0 })
    }

    fn read(&mut self) -> Result<DirEntry, Violation> {
        let rest = &self.bytes[self.at..];
        let mut attachments = NoAttachments;
        let len =
            usize::from(Unpacker::new(rest, &mut attachments).take().map(u16::from_le_bytes)?);
        let record = rest.get(2..len).ok_or(Violation::Length(len as u32))?;
        let mut unpacker = Unpacker::new(record, &mut attachments);
        let entry = DirEntry::unpack(&mut unpacker)?;
        unpacker.finish()?;
        self.at += len;
        Ok(entry)
    }
}

impl Iterator for EntryReader {
    type Item = Result<DirEntry, Violation>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.bytes.len() {
            return None;
        }
        let entry = self.read();
        if entry.is_err() {
            self.at = self.bytes.len();
        }
        Some(entry)
    }
}

/// Rejects attachments: entries hold no blocks.
struct NoAttachments;

impl ExportAttachments for NoAttachments {
    fn export_block(&mut self, _: Block) -> BlockName {
        unreachable!("an entry holds no block")
    }
}

impl ImportAttachments for NoAttachments {
    fn import_block(&mut self, _: BlockName) -> Result<Block, Violation> {
        Err(Violation::Value("Entry"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_types::Time;

    fn test_entry(n: u64, with_attributes: bool) -> DirEntry {
        let attributes = Attributes {
            node: Node(n),
            generation: 7,
            kind: FileType::File,
            mode: 0o100644,
            links: 1,
            uid: 1000,
            gid: 100,
            device: (0, 0),
            size_bytes: n << 40,
            blocks_512: 8,
            block_size_bytes: 4096,
            flags: 0,
            no_xattrs: true,
            accessed: Time { seconds: -1, nanoseconds: 999_999_999 },
            modified: Time::default(),
            changed: Time::default(),
            created: None,
        };
        DirEntry {
            cookie: n,
            node: Node(n),
            kind: n.is_multiple_of(2).then_some(FileType::File),
            name: Name::new(format!("name {n}").as_bytes()).unwrap(),
            attributes: with_attributes.then_some(attributes),
        }
    }

    #[test]
    fn entries_round_trip() {
        for with_attributes in [false, true] {
            let mut block = Block::private(1000);
            let mut entries = EntryWriter::new(&mut block);
            let pushed: Vec<_> = (1..100)
                .map(|n| test_entry(n, with_attributes))
                .take_while(|entry| entries.push(entry))
                .collect();
            assert!(pushed.len() > 3 && pushed.len() < 99);
            let len = entries.len();
            let read: Result<Vec<_>, _> = EntryReader::new(&block, len).unwrap().collect();
            assert_eq!(read.unwrap(), pushed);
        }
    }

    #[test]
    fn random_bytes_do_not_panic_entry_reader() {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        let mut block = Block::private(600);
        let mut entries = EntryWriter::new(&mut block);
        while entries.push(&test_entry(4, random() & 1 == 0)) {}
        let len = entries.len();
        let mut good = vec![0; len as usize];
        block.copy_out(0, &mut good);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            for _ in 0..1 + random() % 4 {
                let at = random() as usize % bytes.len();
                bytes[at] = random() as u8;
            }
            bytes.truncate(1 + random() as usize % bytes.len());
            block.copy_in(0, &bytes);
            let records = EntryReader::new(&block, bytes.len() as u32).unwrap();
            assert!(records.count() <= bytes.len() / 20 + 1);
        }
        assert_eq!(EntryReader::new(&block, 601).unwrap_err(), Violation::Length(601));
    }
}
