//! May this operation touch this object? Pure: paths in, verdict out.
//!
//! Every path is absolute and canonical in the command's own view of the file system (no `.`, `..`, symlinks or double slashes).
use crate::denial::{Operation, Rule};
use crate::plan::Confinement;

/// A judgement. There is no default: nothing is allowed by omission.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The policy permits it.
    Allow,
    /// The policy forbids it, by this rule.
    Refuse(Rule),
}

/// Whether `path` is `root` or lies below it, component-wise (`/a` contains `/a/b`, not `/ab`; `/` contains everything).
#[must_use]
pub fn is_within(root: &[u8], path: &[u8]) -> bool {
    root == b"/" || path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Whether `operation` may create, change or remove the object named `path`.
pub fn write(confinement: &Confinement, operation: Operation, path: &[u8]) -> Verdict {
    let _ = (confinement, operation, path);
    todo!()
}

/// Whether `path` may be read.
pub fn read(confinement: &Confinement, path: &[u8]) -> Verdict {
    let _ = (confinement, path);
    todo!()
}

/// Whether a Unix socket at `path` may be connected or sent to.
pub fn unix_connect(confinement: &Confinement, path: &[u8]) -> Verdict {
    let _ = (confinement, path);
    todo!()
}

/// Whether a socket of this family, type (without flags) and protocol may be created.
pub fn socket(confinement: &Confinement, family: i32, kind: i32, protocol: i32) -> Verdict {
    let _ = (confinement, family, kind, protocol);
    todo!()
}

/// The narrowest change of policy that would allow a refused operation, in words for an approval prompt.
#[must_use]
pub fn allowed_by(confinement: &Confinement, operation: Operation, rule: Rule, path: Option<&[u8]>) -> Option<String> {
    let _ = (confinement, operation, rule, path);
    todo!()
}
