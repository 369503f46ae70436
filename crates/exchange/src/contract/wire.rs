//! How fields of messages become bytes of a line and fields again.
//!
//! ```text
//!   fields ── pack ──▶ private bytes ──▶ line in shared memory
//!   fields ◀─ unpack ─ private copy  ◀── line in shared memory
//! ```
//!
//! An end of a channel is a field as well, so this file and `channel` name each other: the
//! one says how an end travels, the other what it is.
//!
//! Law: unpacking sees a private copy and believes none of it; what it cannot accept it
//! names in a [`Violation`].

use super::{
    Access, AttributeChange, AttributeName, Attributes, Caller, Kept, Kind, Name, Node, Refusal,
    Reservation, SetTime, Space, Time,
    disk::DiskProperties,
    fsm::kind,
    volume::{Mounted, NotMounted},
};
use crate::heap::{Block, arena::BlockName};
pub use crate::violation::Violation;

/// The most bytes a packed message may take.
pub const LINE_BYTES: usize = 1984;

/// Takes the blocks and ends of a message that leaves.
pub trait GoodsOut {
    /// Gives a block away; returns its name on the wire.
    fn block(&mut self, block: Block) -> BlockName;
    /// Gives an end away that sits on a lane; returns its name.
    fn end(&mut self, lane: Option<LaneName>) -> u32;
}

/// Finds the blocks and ends that an arriving message names.
pub trait GoodsIn {
    /// Claims the block that the peer gives.
    ///
    /// # Errors
    /// What is wrong with the name.
    fn block(&mut self, name: BlockName) -> Result<Block, Violation>;
    /// Claims the lane whose end the peer gives; it is joined to an end by the caller.
    ///
    /// # Errors
    /// [`Violation::Lane`].
    fn end(&mut self, lane: u32) -> Result<crate::channel::LaneEnd, Violation>;
}

/// A lane of one session, with how often it was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneName {
    /// Tells sessions of this process apart.
    pub session: usize,
    /// Index of the lane, and its epoch in the upper half.
    pub lane: u32,
}

/// Writes fields into a line's private image.
pub struct Packer<'a> {
    bytes: &'a mut [u8; LINE_BYTES],
    used: usize,
    goods: &'a mut dyn GoodsOut,
}

impl<'a> Packer<'a> {
    /// Starts an empty line in `bytes`.
    pub fn new(bytes: &'a mut [u8; LINE_BYTES], goods: &'a mut dyn GoodsOut) -> Self {
        Self { bytes, used: 0, goods }
    }

    /// How many bytes are used.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Appends `bytes`. That they fit is checked when the contract is compiled.
    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
    }

    /// The taker of goods.
    pub fn goods(&mut self) -> &mut dyn GoodsOut {
        self.goods
    }
}

/// Reads fields from the private copy of a line.
pub struct Unpacker<'a> {
    bytes: &'a [u8],
    goods: &'a mut dyn GoodsIn,
}

impl<'a> Unpacker<'a> {
    /// Reads `bytes` from their start.
    pub fn new(bytes: &'a [u8], goods: &'a mut dyn GoodsIn) -> Self {
        Self { bytes, goods }
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// [`Violation::Length`] when there are fewer.
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let (first, rest) =
            self.bytes.split_first_chunk().ok_or(Violation::Length(self.bytes.len() as u32))?;
        self.bytes = rest;
        Ok(*first)
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`Violation::Length`] when there are fewer.
    pub fn take_slice(&mut self, len: usize) -> Result<&'a [u8], Violation> {
        let (first, rest) =
            self.bytes.split_at_checked(len).ok_or(Violation::Length(self.bytes.len() as u32))?;
        self.bytes = rest;
        Ok(first)
    }

    /// The finder of goods.
    pub fn goods(&mut self) -> &mut dyn GoodsIn {
        self.goods
    }

    /// Checks that nothing is left over.
    ///
    /// # Errors
    /// [`Violation::Length`].
    pub fn finish(self) -> Result<(), Violation> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Violation::Length(self.bytes.len() as u32)) }
    }
}

/// What a field of a message can be.
pub trait Field: Sized {
    /// Tells types apart in a fingerprint.
    const KIND: u64;
    /// The most bytes it takes in a line.
    const BYTES_MAX: usize;
    /// Whether it holds blocks: every reply must return them.
    const BLOCKS: bool = false;
    /// Whether it holds ends of channels: a refusal must return them.
    const ENDS: bool = false;
    /// Appends itself.
    fn pack(self, into: &mut Packer<'_>);
    /// Reads itself.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation>;
}

/// The messages of one direction of a contract.
pub trait Wire: Sized {
    /// Index of the message in the contract's table.
    fn tag(&self) -> u8;
    /// Appends the fields.
    fn pack(self, into: &mut Packer<'_>);
    /// Reads the fields of message `tag`.
    ///
    /// # Errors
    /// What is wrong with the tag or the bytes.
    fn unpack(tag: u8, from: &mut Unpacker<'_>) -> Result<Self, Violation>;
}

macro_rules! numbers {
    ($($t:ident)*) => {$(
        impl Field for $t {
            const KIND: u64 = kind(stringify!($t), &[]);
            const BYTES_MAX: usize = size_of::<$t>();
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
    const KIND: u64 = kind("bool", &[]);
    const BYTES_MAX: usize = 1;
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
    const KIND: u64 = kind("Option", &[T::KIND]);
    const BYTES_MAX: usize = 1 + T::BYTES_MAX;
    const BLOCKS: bool = T::BLOCKS;
    const ENDS: bool = T::ENDS;
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
    const KIND: u64 = kind("pair", &[A::KIND, B::KIND]);
    const BYTES_MAX: usize = A::BYTES_MAX + B::BYTES_MAX;
    const BLOCKS: bool = A::BLOCKS || B::BLOCKS;
    const ENDS: bool = A::ENDS || B::ENDS;
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
    /// No values.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Appends a value.
    ///
    /// # Errors
    /// The value comes back when the list is full.
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.0.len() == MAX {
            return Err(value);
        }
        self.0.push(value);
        Ok(())
    }

    /// The values.
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
    const KIND: u64 = kind("List", &[T::KIND, MAX as u64]);
    const BYTES_MAX: usize = 4 + MAX * T::BYTES_MAX;
    const BLOCKS: bool = T::BLOCKS;
    const ENDS: bool = T::ENDS;
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
    const KIND: u64 = kind("Block", &[]);
    const BYTES_MAX: usize = 12;
    const BLOCKS: bool = true;
    fn pack(self, into: &mut Packer<'_>) {
        let BlockName { slot, generation, len } = into.goods().block(self);
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
        from.goods().block(name)
    }
}

/// Makes a struct of fields a field.
macro_rules! records {
    ($($t:ident { $($f:tt: $ft:ty),* })*) => {$(
        impl Field for $t {
            const KIND: u64 = kind(stringify!($t), &[$(<$ft as Field>::KIND),*]);
            const BYTES_MAX: usize = 0 $(+ <$ft as Field>::BYTES_MAX)*;
            fn pack(self, into: &mut Packer<'_>) {
                $(self.$f.pack(into);)*
            }
            fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
                Ok(Self { $($f: Field::unpack(from)?),* })
            }
        }
    )*};
}

records! {
    Node { 0: u64 }
    Space {
        block_bytes: u32, blocks: u64, free_blocks: u64, available_blocks: u64,
        inodes: u64, free_inodes: u64, name_bytes_max: u32, id: u64
    }
    Attributes {
        node: Node, generation: u32, kind: Kind, mode: u32, links: u32, uid: u32, gid: u32,
        device: (u32, u32), size_bytes: u64, blocks_512: u64, block_size_bytes: u32, flags: u32,
        no_xattrs: bool, accessed: Time, modified: Time, changed: Time, created: Option<Time>
    }
    AttributeChange {
        mode: Option<u32>, uid: Option<u32>, gid: Option<u32>, size_bytes: Option<u64>,
        accessed: Option<SetTime>, modified: Option<SetTime>, changed: Option<SetTime>,
        clear_privileges: Option<Caller>
    }
    Caller { uid: u32, gid: u32 }
    DiskProperties {
        len_bytes: u64, sector_bytes: u32, best_io_bytes: u32, rotational: bool, read_only: bool,
        atomic: u32, discards: bool, chain_groups_max: u32, chain_writes_max: u32, chain_bytes_max: u64
    }
    Mounted { space: Space, read_only: bool }
    NotMounted { why: Refusal, said_bytes: u32 }
}

impl Field for Time {
    const KIND: u64 = kind("Time", &[]);
    const BYTES_MAX: usize = 12;
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
    const KIND: u64 = kind("SetTime", &[]);
    const BYTES_MAX: usize = 1 + Time::BYTES_MAX;
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

impl Field for Reservation {
    const KIND: u64 = kind("Reservation", &[]);
    const BYTES_MAX: usize = 1;
    fn pack(self, into: &mut Packer<'_>) {
        into.put(&[match self {
            Reservation::Extend => 0,
            Reservation::KeepSize => 1,
            Reservation::PunchHole => 2,
            Reservation::ZeroRange { keep_size: false } => 3,
            Reservation::ZeroRange { keep_size: true } => 4,
        }]);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(match from.take()? {
            [0] => Reservation::Extend,
            [1] => Reservation::KeepSize,
            [2] => Reservation::PunchHole,
            [3] => Reservation::ZeroRange { keep_size: false },
            [4] => Reservation::ZeroRange { keep_size: true },
            _ => return Err(Violation::Value("Reservation")),
        })
    }
}

impl Field for Access {
    const KIND: u64 = kind("Access", &[]);
    const BYTES_MAX: usize = 3;
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

impl Field for Kept {
    const KIND: u64 = kind("Kept", &[]);
    const BYTES_MAX: usize = 1;
    fn pack(self, into: &mut Packer<'_>) {
        into.put(&[match self {
            Kept::Valid => 0,
            Kept::Stale => 1,
            Kept::Never => 2,
        }]);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Ok(match from.take()? {
            [0] => Kept::Valid,
            [1] => Kept::Stale,
            [2] => Kept::Never,
            _ => return Err(Violation::Value("Kept")),
        })
    }
}

impl Field for Kind {
    const KIND: u64 = kind("Kind", &[]);
    const BYTES_MAX: usize = 4;
    fn pack(self, into: &mut Packer<'_>) {
        (self as u32).pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Kind::from_number(u32::unpack(from)?).ok_or(Violation::Value("Kind"))
    }
}

impl Field for Refusal {
    const KIND: u64 = kind("Refusal", &[Refusal::ALL.len() as u64]);
    const BYTES_MAX: usize = 4;
    fn pack(self, into: &mut Packer<'_>) {
        (self as u32).pack(into);
    }
    fn unpack(from: &mut Unpacker<'_>) -> Result<Self, Violation> {
        Refusal::from_number(u32::unpack(from)?).ok_or(Violation::Value("Refusal"))
    }
}

/// Makes a short name a field: its length and its bytes.
macro_rules! names {
    ($($t:ident)*) => {$(
        impl Field for $t {
            const KIND: u64 = kind(stringify!($t), &[]);
            const BYTES_MAX: usize = 1 + $t::MAX_BYTES;
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

    /// Lends nothing: what is tested here carries no goods.
    struct Nothing;

    impl GoodsOut for Nothing {
        fn block(&mut self, _: Block) -> BlockName {
            unreachable!()
        }
        fn end(&mut self, _: Option<LaneName>) -> u32 {
            unreachable!()
        }
    }

    impl GoodsIn for Nothing {
        fn block(&mut self, name: BlockName) -> Result<Block, Violation> {
            Err(Violation::Slot(name.slot))
        }
        fn end(&mut self, lane: u32) -> Result<crate::channel::LaneEnd, Violation> {
            Err(Violation::Lane(lane))
        }
    }

    fn packed<T: Field>(value: T) -> Vec<u8> {
        let (mut line, mut goods) = ([0; LINE_BYTES], Nothing);
        let mut packer = Packer::new(&mut line, &mut goods);
        value.pack(&mut packer);
        let used = packer.used();
        assert!(used <= T::BYTES_MAX, "{used} bytes exceed {}", T::BYTES_MAX);
        line[..used].to_vec()
    }

    fn unpacked<T: Field>(bytes: &[u8]) -> Result<T, Violation> {
        let mut goods = Nothing;
        let mut unpacker = Unpacker::new(bytes, &mut goods);
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
        goes_round(Space { block_bytes: 1, free_inodes: u64::MAX, ..Space::default() });
        goes_round(AttributeChange {
            mode: Some(0o7777),
            size_bytes: Some(u64::MAX),
            accessed: Some(SetTime::Now),
            modified: Some(SetTime::To(Time { seconds: 1, nanoseconds: 2 })),
            changed: Some(SetTime::To(Time { seconds: -3, nanoseconds: 4 })),
            clear_privileges: Some(Caller { uid: 1, gid: 2 }),
            ..AttributeChange::default()
        });
        for keep_size in [false, true] {
            goes_round(Reservation::ZeroRange { keep_size });
        }
        for how in [Reservation::Extend, Reservation::KeepSize, Reservation::PunchHole] {
            goes_round(how);
        }
        assert!(unpacked::<Reservation>(&[5]).is_err());
        for kept in [Kept::Valid, Kept::Stale, Kept::Never] {
            goes_round(kept);
        }
        assert!(unpacked::<Kept>(&[3]).is_err());
        goes_round(Access { read: true, write: false, append: true });
        assert!(unpacked::<Access>(&[0, 2, 0]).is_err());
        Refusal::ALL.into_iter().for_each(goes_round);
        (1..=7).filter_map(Kind::from_number).for_each(goes_round);
    }

    #[test]
    fn impossible_values_are_named() {
        assert_eq!(unpacked::<bool>(&[2]), Err(Violation::Value("bool")));
        assert_eq!(unpacked::<Option<u8>>(&[7, 0]), Err(Violation::Value("bool")));
        assert_eq!(unpacked::<Kind>(&[8, 0, 0, 0]), Err(Violation::Value("Kind")));
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
