//! Changes that become visible together: pure memory.

use std::fmt;

/// The name of an object. Never given out twice by one store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ObjectId(pub u64);

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of an object that is yet to be created; creating uses it up.
#[derive(Debug, PartialEq, Eq)]
pub struct NewObject(pub(crate) ObjectId);

impl NewObject {
    /// What the object will be called.
    pub fn id(&self) -> ObjectId {
        self.0
    }
}

/// What the one who creates an object knows of its future. A hint moves bytes, it never
/// changes what is read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Hint {
    /// Nothing is known: the store watches how long things live.
    #[default]
    Unknown,
    /// Overwritten or deleted soon.
    Hot,
    /// Kept for long.
    Cold,
}

/// One change. Payloads lie in the group's buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Create { id: ObjectId, hint: Hint },
    Fork { id: ObjectId, parent: ObjectId },
    Write { id: ObjectId, at: u64, from: usize, len: usize },
    Append { id: ObjectId, from: usize, len: usize },
    Truncate { id: ObjectId, len: u64 },
    Punch { id: ObjectId, at: u64, len: u64 },
    Delete { id: ObjectId },
    Put { key: usize, key_len: usize, value: usize, value_len: usize },
    Remove { key: usize, key_len: usize },
    Name { name: usize, name_len: usize, id: ObjectId },
    Unname { name: usize, name_len: usize },
}

/// Changes that become visible together, in the order in which they were added.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Group {
    pub(crate) ops: Vec<Op>,
    pub(crate) bytes: Vec<u8>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({} changes, {} bytes)", self.ops.len(), self.bytes.len())
    }
}

impl Group {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Bytes of payload.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Creates an empty object.
    pub fn create(&mut self, new: NewObject, hint: Hint) -> ObjectId {
        self.ops.push(Op::Create { id: new.0, hint });
        new.0
    }

    /// Creates an object over another one: it shows what that shows wherever nothing else was
    /// written to it, and costs as much as an empty one. The other one does not change as long as
    /// there is one over it, and is not deleted.
    pub fn fork(&mut self, new: NewObject, parent: ObjectId) -> ObjectId {
        self.ops.push(Op::Fork { id: new.0, parent });
        new.0
    }

    /// Writes `bytes` at byte `at` of an object, which grows where they end behind it;
    /// what lies between reads as zeros.
    pub fn write(&mut self, id: ObjectId, at: u64, bytes: &[u8]) {
        let from = self.keep(bytes);
        self.ops.push(Op::Write { id, at, from, len: bytes.len() });
    }

    /// Writes `bytes` behind the end that the object has by then.
    pub fn append(&mut self, id: ObjectId, bytes: &[u8]) {
        let from = self.keep(bytes);
        self.ops.push(Op::Append { id, from, len: bytes.len() });
    }

    /// Gives an object a length; what is new reads as zeros.
    pub fn truncate(&mut self, id: ObjectId, len: u64) {
        self.ops.push(Op::Truncate { id, len });
    }

    /// Gives up `len` bytes of an object from byte `at` on: they read as zeros, and take no room.
    /// Its length stays.
    pub fn punch(&mut self, id: ObjectId, at: u64, len: u64) {
        self.ops.push(Op::Punch { id, at, len });
    }

    /// Gives an object a name, of 1 to 255 bytes, whatever the name led to before.
    pub fn name(&mut self, name: &[u8], id: ObjectId) {
        let at = self.keep(name);
        self.ops.push(Op::Name { name: at, name_len: name.len(), id });
    }

    /// Takes a name away, if it is there; the object stays.
    pub fn unname(&mut self, name: &[u8]) {
        let at = self.keep(name);
        self.ops.push(Op::Unname { name: at, name_len: name.len() });
    }

    /// Deletes an object. Its names lead nowhere then: take them away with it.
    pub fn delete(&mut self, id: ObjectId) {
        self.ops.push(Op::Delete { id });
    }

    /// Gives `key` a value.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) {
        self.bytes.reserve(key.len().saturating_add(value.len()));
        let (key_at, value_at) = (self.keep(key), self.keep(value));
        self.ops.push(Op::Put {
            key: key_at,
            key_len: key.len(),
            value: value_at,
            value_len: value.len(),
        });
    }

    /// Takes a key away.
    pub(crate) fn remove(&mut self, key: &[u8]) {
        let at = self.keep(key);
        self.ops.push(Op::Remove { key: at, key_len: key.len() });
    }

    fn keep(&mut self, bytes: &[u8]) -> usize {
        let from = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        from
    }
}
