//! Users of calls: the thread changes to a user, and back to root.

use crate::sys;

pub const OWNER: u32 = 1001;
pub const GROUP: u32 = 2001;
/// A user in the group of the files who does not own them.
pub const MEMBER: u32 = 1002;
pub const OTHER: u32 = 1003;
/// A group that the owner is not in.
pub const FOREIGN: u32 = 2002;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Who {
    Root,
    Owner,
    Member,
    Other,
    /// Another user with `CAP_FOWNER`, the privileges of owners.
    Fowner,
}

impl Who {
    pub const ALL: [Self; 5] = [Self::Root, Self::Owner, Self::Member, Self::Other, Self::Fowner];

    /// Runs `deed` as this user.
    pub fn act<T>(self, deed: impl FnOnce() -> T) -> T {
        const CAP_FOWNER: u64 = 1 << 3;
        match self {
            Self::Root => return deed(),
            Self::Owner => sys::become_user(OWNER, GROUP, &[GROUP], 0),
            Self::Member => sys::become_user(MEMBER, 2005, &[GROUP, 2005], 0),
            Self::Other => sys::become_user(OTHER, 2003, &[2003], 0),
            Self::Fowner => sys::become_user(OTHER, 2003, &[2003], CAP_FOWNER),
        }
        let done = deed();
        sys::become_root();
        done
    }
}
