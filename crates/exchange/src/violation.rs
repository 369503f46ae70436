//! What a peer can do wrong, in the words of all that notice it: heap, lanes and contracts.

/// How a peer broke the contract.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// No message has this tag.
    #[error("tag {0} names no message")]
    Tag(u32),
    /// The message may not be sent now.
    #[error("{message} may not be sent in state {state}")]
    State {
        /// What came.
        message: &'static str,
        /// When.
        state: &'static str,
    },
    /// The message is longer or shorter than its fields.
    #[error("a message of {0} bytes has the wrong length")]
    Length(u32),
    /// A field holds what its type does not allow.
    #[error("a field of type {0} holds an impossible value")]
    Value(&'static str),
    /// No slot of the arena has this number.
    #[error("slot {0} does not exist")]
    Slot(u32),
    /// The peer names a slot that it does not own.
    #[error("slot {0} is not the sender's to give")]
    Owner(u32),
    /// The slot was given with another generation.
    #[error("slot {0} has another generation")]
    Generation(u32),
    /// A block is longer than its slot, or another length than was lent.
    #[error("a block of slot {0} has a length it cannot have")]
    BlockLength(u32),
    /// What the peer gives lies at this byte of a memory that does not have all of it, or is
    /// nothing.
    #[error("nothing that can be given lies at byte {0} of the memory beside")]
    PoolRange(u32),
    /// No lane has this number, or it is taken.
    #[error("lane {0} cannot be bound")]
    Lane(u32),
    /// The two ends were built from different contracts.
    #[error("the peer speaks another contract")]
    Fingerprint,
    /// A line was written before its predecessor was read, or out of turn.
    #[error("a line was written out of turn")]
    Turn,
    /// The peer rang again and again without saying anything.
    #[error("the peer rings without a message")]
    Flood,
    /// The shared memory is not sealed or has another size.
    #[error("the shared memory is not what was agreed: {0}")]
    Memory(&'static str),
    /// The session was opened with the wrong descriptors.
    #[error("the session's descriptors are not what was agreed: {0}")]
    Descriptors(&'static str),
}
