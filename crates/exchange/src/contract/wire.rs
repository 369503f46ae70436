//! Encoding of message fields into the bytes of a mailbox, and decoding.
//!
//! ```text
//!   fields ── pack ──▶ private bytes ──▶ mailbox in shared memory
//!   fields ◀─ unpack ─ private copy  ◀── mailbox in shared memory
//! ```
//!
//! Law: unpacking reads a private copy and trusts none of it. It reports invalid bytes as a
//! [`Violation`].

use super::fsm::type_hash;
use crate::heap::arena::BlockName;
pub use crate::violation::Violation;
use draconis_types::Block;
use draconis_types::{
    Access, AttributeChange, AttributeName, Attributes, CacheValidity, Credentials, FallocateMode,
    FileType, Name, Node, Refusal, SetTime, StatFs, Time,
};

/// Maximum length of a packed message in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1984;

/// Exports the blocks of an outgoing message.
pub trait ExportAttachments {
    /// Exports a block; returns its name on the wire.
    fn export_block(&mut self, block: Block) -> BlockName;
}

/// Imports the blocks that an incoming message names.
pub trait ImportAttachments {
    /// Claims a block that the peer exported.
    ///
    /// # Errors
    /// Defect of the name.
    fn import_block(&mut self, name: BlockName) -> Result<Block, Violation>;
}

/// Writes fields into the private image of a mailbox.
pub struct Packer<'a> {
    bytes: &'a mut [u8; MAX_MESSAGE_BYTES],
    used: usize,
    goods: &'a mut dyn ExportAttachments,
}

impl<'a> Packer<'a> {
    /// Starts an empty message in `bytes`.
    pub fn new(
        bytes: &'a mut [u8; MAX_MESSAGE_BYTES],
        goods: &'a mut dyn ExportAttachments,
    ) -> Self {
        Self { bytes, used: 0, goods }
    }

    /// Returns the number of bytes used.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Appends `bytes`. The contract's compilation has checked that they fit.
    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
    }

    /// Returns the exporter of attachments.
    pub fn attachments(&mut self) -> &mut dyn ExportAttachments {
        self.goods
    }
}

/// Reads fields from the private copy of a mailbox.
pub struct Unpacker<'a> {
    bytes: &'a [u8],
    goods: &'a mut dyn ImportAttachments,
}

impl<'a> Unpacker<'a> {
    /// Creates an unpacker at the start of `bytes`.
    pub fn new(bytes: &'a [u8], goods: &'a mut dyn ImportAttachments) -> Self {
        Self { bytes, goods }
    }

    /// Reads the next `N` bytes.
    ///
    /// # Errors
    /// [`Violation::Length`] if there are fewer.
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let (first, rest) =
            self.bytes.split_first_chunk().ok_or(Violation::Length(self.bytes.len() as u32))?;
        self.bytes = rest;
        Ok(*first)
    }

    /// Reads the next `len` bytes.
    ///
    /// # Errors
    /// [`Violation::Length`] if there are fewer.
    pub fn take_slice(&mut self, len: usize) -> Result<&'a [u8], Violation> {
        let (first, rest) =
            self.bytes.split_at_checked(len).ok_or(Violation::Length(self.bytes.len() as u32))?;
        self.bytes = rest;
        Ok(first)
    }

    /// Returns the importer of attachments.
    pub fn attachments(&mut self) -> &mut dyn ImportAttachments {
        self.goods
    }

    /// Checks that all bytes were read.
    ///
    /// # Errors
    /// [`Violation::Length`].
    pub fn finish(self) -> Result<(), Violation> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Violation::Length(self.bytes.len() as u32)) }
    }
}

/// A type that message fields can have.
pub trait Field: Sized {
    /// Identifies the type in a fingerprint.
    const TYPE_HASH: u64;
    /// Maximum encoded length in bytes.
    const MAX_BYTES: usize;
    /// True if it holds blocks: every reply must return them.
    const HAS_BLOCKS: bool = false;
    /// Appends the value.
    fn pack(self, into: &mut Packer<'_>);
    /// Reads a value.
    ///
    /// # Errors
    /// Defect of the bytes.
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation>;
}

/// Messages of one direction of a contract.
pub trait Wire: Sized {
    /// Index of the message in the contract's table.
    fn tag(&self) -> u8;
    /// Appends the fields.
    fn pack(self, into: &mut Packer<'_>);
    /// Reads the fields of message `tag`.
    ///
    /// # Errors
    /// Defect of the tag or the bytes.
    fn unpack(tag: u8, from: &mut Unpacker<'_>) -> Result<Self, Violation>;
}

macro_rules! numbers {
    ($($t:ident)*) => {$(
        impl Field for $t {
            const TYPE_HASH: u64 = type_hash(stringify!($t), &[]);
            const MAX_BYTES: usize = size_of::<$t>();
            fn pack(self, into: &mut Packer<'_>) {
                into.put(&self.to_le_bytes());
            }
            fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
                from.take().map(<$t>::from_le_bytes)
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64 i64);

impl Field for bool {
    const TYPE_HASH: u64 = type_hash("bool", &[]);
    const MAX_BYTES: usize = 1;
    fn pack(self, into: &mut Packer<'_>) {
        into.put(&[u8::from(self)]);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        match from.take()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(Violation::Value("bool")),
        }
    }
}

impl<T: Field> Field for Option<T> {
    const TYPE_HASH: u64 = type_hash("Option", &[T::TYPE_HASH]);
    const MAX_BYTES: usize = 1 + T::MAX_BYTES;
    const HAS_BLOCKS: bool = T::HAS_BLOCKS;
    fn pack(self, into: &mut Packer<'_>) {
        into.put(&[u8::from(self.is_some())]);
        if let Some(value) = self {
            value.pack(into);
        }
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        bool::unpack(from)?.then(|| T::unpack(from)).transpose()
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    const TYPE_HASH: u64 = type_hash("pair", &[A::TYPE_HASH, B::TYPE_HASH]);
    const MAX_BYTES: usize = A::MAX_BYTES + B::MAX_BYTES;
    const HAS_BLOCKS: bool = A::HAS_BLOCKS || B::HAS_BLOCKS;
    fn pack(self, into: &mut Packer<'_>) {
        self.0.pack(into);
        self.1.pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok((A::unpack(from)?, B::unpack(from)?))
    }
}

/// At most `MAX` values.
#[derive(Debug)]
pub struct List<T, const MAX: usize>(Vec<T>);

impl<T, const MAX: usize> List<T, MAX> {
    /// Creates an empty list.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Appends a value.
    ///
    /// # Errors
    /// The value, if the list is full.
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.0.len() == MAX {
            return Err(value);
        }
        self.0.push(value);
        Ok(())
    }

    /// Returns the values.
    pub fn into_vec(self) -> Vec<T> {
        self.0
    }
}

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T, const MAX: usize> TryFrom<Vec<T>> for List<T, MAX> {
    type Error = Vec<T>;
    fn try_from(values: Vec<T>) -> Result<Self, Vec<T>> {
        if values.len() <= MAX { Ok(Self(values)) } else { Err(values) }
    }
}

impl<T, const MAX: usize> std::ops::Deref for List<T, MAX> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Field, const MAX: usize> Field for List<T, MAX> {
    const TYPE_HASH: u64 = type_hash("List", &[T::TYPE_HASH, MAX as u64]);
    const MAX_BYTES: usize = 4 + MAX * T::MAX_BYTES;
    const HAS_BLOCKS: bool = T::HAS_BLOCKS;
    fn pack(self, into: &mut Packer<'_>) {
        (self.0.len() as u32).pack(into);
        for value in self.0 {
            value.pack(into);
        }
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        let len = u32::unpack(from)? as usize;
        if len > MAX {
            return Err(Violation::Value("List"));
        }
        (0..len).map(|_| T::unpack(from)).collect::<Result<_, _>>().map(Self)
    }
}

impl Field for Block {
    const TYPE_HASH: u64 = type_hash("Block", &[]);
    const MAX_BYTES: usize = 12;
    const HAS_BLOCKS: bool = true;
    fn pack(self, into: &mut Packer<'_>) {
        let BlockName { slot, generation, len } = into.attachments().export_block(self);
        for word in [slot, generation, len] {
            word.pack(into);
        }
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        let name = BlockName {
            slot: u32::unpack(from)?,
            generation: u32::unpack(from)?,
            len: u32::unpack(from)?,
        };
        from.attachments().import_block(name)
    }
}

/// Implements [`Field`] for a struct of fields.
macro_rules! records {
    ($($t:ident { $($f:tt: $ft:ty),* })*) => {
        const _: () = {
            use $crate::contract::fsm::type_hash;
            use $crate::contract::wire::{Field, Packer, Unpacker, Violation};
            $(impl Field for $t {
                const TYPE_HASH: u64 = type_hash(stringify!($t), &[$(<$ft as Field>::TYPE_HASH),*]);
                const MAX_BYTES: usize = 0 $(+ <$ft as Field>::MAX_BYTES)*;
                fn pack(self, into: &mut Packer<'_>) {
                    $(self.$f.pack(into);)*
                }
                fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
                    Ok(Self { $($f: Field::unpack(from)?),* })
                }
            })*
        };
    };
}
pub(super) use records;

records! {
    Node { 0: u64 }
    StatFs {
        block_bytes: u32, blocks: u64, free_blocks: u64, available_blocks: u64,
        inodes: u64, free_inodes: u64, name_bytes_max: u32, id: u64
    }
    Attributes {
        node: Node, generation: u32, kind: FileType, mode: u32, links: u32, uid: u32, gid: u32,
        device: (u32, u32), size_bytes: u64, blocks_512: u64, block_size_bytes: u32, flags: u32,
        no_xattrs: bool, accessed: Time, modified: Time, changed: Time, created: Option<Time>
    }
    AttributeChange {
        mode: Option<u32>, uid: Option<u32>, gid: Option<u32>, size_bytes: Option<u64>,
        accessed: Option<SetTime>, modified: Option<SetTime>, changed: Option<SetTime>,
        clear_privileges: Option<Credentials>
    }
    Credentials { uid: u32, gid: u32 }
}

impl Field for Time {
    const TYPE_HASH: u64 = type_hash("Time", &[]);
    const MAX_BYTES: usize = 12;
    fn pack(self, into: &mut Packer<'_>) {
        self.seconds.pack(into);
        self.nanoseconds.pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        let time = Time { seconds: i64::unpack(from)?, nanoseconds: u32::unpack(from)? };
        if time.nanoseconds < 1_000_000_000 { Ok(time) } else { Err(Violation::Value("Time")) }
    }
}

impl Field for SetTime {
    const TYPE_HASH: u64 = type_hash("SetTime", &[]);
    const MAX_BYTES: usize = 1 + Time::MAX_BYTES;
    fn pack(self, into: &mut Packer<'_>) {
        match self {
            SetTime::Now => None,
            SetTime::To(time) => Some(time),
        }
        .pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(Option::unpack(from)?.map_or(SetTime::Now, SetTime::To))
    }
}

impl Field for FallocateMode {
    const TYPE_HASH: u64 = type_hash("Reservation", &[]);
    const MAX_BYTES: usize = 1;
    fn pack(self, into: &mut Packer<'_>) {
        into.put(&[match self {
            FallocateMode::Allocate => 0,
            FallocateMode::KeepSize => 1,
            FallocateMode::PunchHole => 2,
            FallocateMode::ZeroRange { keep_size: false } => 3,
            FallocateMode::ZeroRange { keep_size: true } => 4,
        }]);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(match from.take()? {
            [0] => FallocateMode::Allocate,
            [1] => FallocateMode::KeepSize,
            [2] => FallocateMode::PunchHole,
            [3] => FallocateMode::ZeroRange { keep_size: false },
            [4] => FallocateMode::ZeroRange { keep_size: true },
            _ => return Err(Violation::Value("Reservation")),
        })
    }
}

impl Field for Access {
    const TYPE_HASH: u64 = type_hash("Access", &[]);
    const MAX_BYTES: usize = 3;
    fn pack(self, into: &mut Packer<'_>) {
        for bit in [self.read, self.write, self.append] {
            bit.pack(into);
        }
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(Access {
            read: Field::unpack(from)?,
            write: Field::unpack(from)?,
            append: Field::unpack(from)?,
        })
    }
}

impl Field for CacheValidity {
    const TYPE_HASH: u64 = type_hash("Kept", &[]);
    const MAX_BYTES: usize = 1;
    fn pack(self, into: &mut Packer<'_>) {
        into.put(&[match self {
            CacheValidity::Valid => 0,
            CacheValidity::Stale => 1,
            CacheValidity::Never => 2,
        }]);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(match from.take()? {
            [0] => CacheValidity::Valid,
            [1] => CacheValidity::Stale,
            [2] => CacheValidity::Never,
            _ => return Err(Violation::Value("Kept")),
        })
    }
}

impl Field for FileType {
    const TYPE_HASH: u64 = type_hash("Kind", &[]);
    const MAX_BYTES: usize = 4;
    fn pack(self, into: &mut Packer<'_>) {
        (self as u32).pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        FileType::from_number(u32::unpack(from)?).ok_or(Violation::Value("Kind"))
    }
}

impl Field for Refusal {
    const TYPE_HASH: u64 = type_hash("Refusal", &[Refusal::ALL.len() as u64]);
    const MAX_BYTES: usize = 4;
    fn pack(self, into: &mut Packer<'_>) {
        (self as u32).pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Refusal::from_number(u32::unpack(from)?).ok_or(Violation::Value("Refusal"))
    }
}

/// Implements [`Field`] for a short name: its length, then its bytes.
macro_rules! names {
    ($($t:ident)*) => {$(
        impl Field for $t {
            const TYPE_HASH: u64 = type_hash(stringify!($t), &[]);
            const MAX_BYTES: usize = 1 + $t::MAX_BYTES;
            fn pack(self, into: &mut Packer<'_>) {
                let bytes = self.as_bytes();
                // A name has at most 255 bytes.
                into.put(&[bytes.len() as u8]);
                into.put(bytes);
            }
            fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
                let len = usize::from(u8::unpack(from)?);
                $t::new(from.take_slice(len)?).map_err(|_| Violation::Value(stringify!($t)))
            }
        }
    )*};
}

names!(Name AttributeName);

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    /// Rejects attachments: the tested fields carry none.
    struct Nothing;

    impl ExportAttachments for Nothing {
        fn export_block(&mut self, _: Block) -> BlockName {
            unreachable!()
        }
    }

    impl ImportAttachments for Nothing {
        fn import_block(&mut self, name: BlockName) -> Result<Block, Violation> {
            Err(Violation::Slot(name.slot))
        }
    }

    fn packed<T: Field>(value: T) -> Vec<u8> {
        let (mut line, mut goods) = ([0; MAX_MESSAGE_BYTES], Nothing);
        let mut packer = Packer::new(&mut line, &mut goods);
        value.pack(&mut packer);
        let used = packer.used();
        assert!(used <= T::MAX_BYTES, "{used} bytes exceed {}", T::MAX_BYTES);
        line[..used].to_vec()
    }

    fn unpacked<T: Field>(bytes: &[u8]) -> Result<T, Violation> {
        let mut attachments = Nothing;
        let mut unpacker = Unpacker::new(bytes, &mut attachments);
        let value = T::unpack(&mut unpacker)?;
        unpacker.finish().map(|()| value)
    }

    #[track_caller]
    fn goes_round<T: Field + PartialEq + Debug + Copy>(value: T) {
        let bytes = packed(value);
        assert_eq!(unpacked::<T>(&bytes), Ok(value));
        assert!(unpacked::<T>(&bytes[..bytes.len() - 1]).is_err(), "cut short");
        assert!(unpacked::<T>(&[&bytes[..], &[0]].concat()).is_err(), "too long");
    }

    #[test]
    fn fields_go_round() {
        goes_round(u64::MAX);
        goes_round(i64::MIN);
        goes_round(true);
        goes_round(Some((7u8, 9u16)));
        goes_round(None::<u32>);
        goes_round(Node(u64::MAX));
        goes_round(Name::new(&[b'x'; 255]).unwrap());
        goes_round(AttributeName::new(b"user.with/slash").unwrap());
        goes_round(Time { seconds: -1, nanoseconds: 999_999_999 });
        goes_round(StatFs { block_bytes: 1, free_inodes: u64::MAX, ..StatFs::default() });
        goes_round(AttributeChange {
            mode: Some(0o7777),
            size_bytes: Some(u64::MAX),
            accessed: Some(SetTime::Now),
            modified: Some(SetTime::To(Time { seconds: 1, nanoseconds: 2 })),
            changed: Some(SetTime::To(Time { seconds: -3, nanoseconds: 4 })),
            clear_privileges: Some(Credentials { uid: 1, gid: 2 }),
            ..AttributeChange::default()
        });
        for keep_size in [false, true] {
            goes_round(FallocateMode::ZeroRange { keep_size });
        }
        for how in [FallocateMode::Allocate, FallocateMode::KeepSize, FallocateMode::PunchHole] {
            goes_round(how);
        }
        assert!(unpacked::<FallocateMode>(&[5]).is_err());
        for kept in [CacheValidity::Valid, CacheValidity::Stale, CacheValidity::Never] {
            goes_round(kept);
        }
        assert!(unpacked::<CacheValidity>(&[3]).is_err());
        goes_round(Access { read: true, write: false, append: true });
        assert!(unpacked::<Access>(&[0, 2, 0]).is_err());
        Refusal::ALL.into_iter().for_each(goes_round);
        (1..=7).filter_map(FileType::from_number).for_each(goes_round);
    }

    #[test]
    fn impossible_values_are_named() {
        assert_eq!(unpacked::<bool>(&[2]), Err(Violation::Value("bool")));
        assert_eq!(unpacked::<Option<u8>>(&[7, 0]), Err(Violation::Value("bool")));
        assert_eq!(unpacked::<FileType>(&[8, 0, 0, 0]), Err(Violation::Value("Kind")));
        assert_eq!(unpacked::<Refusal>(&[0; 4]), Err(Violation::Value("Refusal")));
        let late = [&[0; 8][..], &1_000_000_000u32.to_le_bytes()].concat();
        assert_eq!(unpacked::<Time>(&late), Err(Violation::Value("Time")));
        for name in [&b"\0"[..], b"\x01/", b"\x03a\0b"] {
            assert_eq!(unpacked::<Name>(name), Err(Violation::Value("Name")));
        }
        let (empty, nul) = (&b"\0"[..], b"\x03a\0b");
        for name in [empty, nul] {
            let value = Violation::Value("AttributeName");
            assert_eq!(unpacked::<AttributeName>(name), Err(value));
        }
        let five = unpacked::<List<u8, 4>>(&[5, 0, 0, 0, 1, 2, 3, 4, 5]);
        assert_eq!(five.unwrap_err(), Violation::Value("List"));
        let endless = unpacked::<List<u8, 4>>(&[255; 4]);
        assert_eq!(endless.unwrap_err(), Violation::Value("List"));
    }
}
