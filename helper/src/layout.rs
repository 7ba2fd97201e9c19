//! Which mounts make a command's view of the file system in its own mount namespace.
use std::ffi::CString;
use std::path::Path;

use dsh_policy::bytes::ByteString;
use dsh_policy::mode::{Network, Tier};
use dsh_policy::plan::{Confinement, Failure, Step};

use crate::launch::failure;
use crate::sys::{Apart, Layout, Mount};

const SHARED_MEMORY: &[u8] = b"/dev/shm";
/// Their modes and owners change when a program takes a terminal of its own; whose they are is the supervisor's to say.
const TERMINALS: &[u8] = b"/dev/pts";
const TMP: &[u8] = b"/tmp";

/// The namespaces that a confinement asks for; none in the landlock tier.
pub(crate) fn apart(confinement: &Confinement) -> Option<Apart> {
    (confinement.tier != Tier::Landlock).then_some(Apart {
        network: confinement.network != Network::Full,
    })
}

/// The mounts of a confinement. Makes the folders on which roots below a private `/tmp` are mounted.
pub(crate) fn of(confinement: &Confinement) -> Result<Layout, Failure> {
    let mut mounts = Vec::new();
    let mut writable: Vec<&ByteString> = confinement.writable.iter().collect();
    // Outer ones first: what is mounted later lies on top.
    writable.sort_by_key(|root| root.as_bytes().len());
    let private_tmp = confinement.private_tmp_root.as_ref();
    let terminals = ByteString::from(TERMINALS.to_vec());
    if Path::new("/dev/pts").exists() {
        mounts.push(same(&terminals)?);
    }
    for root in writable {
        let below = root.as_bytes().strip_prefix(b"/tmp/");
        match (root.as_bytes(), private_tmp) {
            (SHARED_MEMORY, _) => {}
            (TMP, Some(private)) => mounts.push(Mount::Writable(text(private)?, text(root)?)),
            (_, Some(private)) if below.is_some() => {
                make_mount_point(private, root, below.unwrap_or_default())?;
                mounts.push(same(root)?);
            }
            _ => mounts.push(same(root)?),
        }
    }
    if Path::new("/dev/shm").is_dir() {
        mounts.push(Mount::SharedMemory(text(&ByteString::from(SHARED_MEMORY.to_vec()))?));
    }
    let whole = confinement.writable.iter().any(|root| root.as_bytes() == b"/");
    Ok(Layout {
        read_only: !whole,
        mounts,
    })
}

fn same(root: &ByteString) -> Result<Mount, Failure> {
    Ok(Mount::Writable(text(root)?, text(root)?))
}

fn text(path: &ByteString) -> Result<CString, Failure> {
    CString::new(path.as_bytes()).map_err(|_| failure(Step::Mounts, libc::EINVAL, path.display()))
}

/// `below` in the folder that becomes `/tmp`: a folder, or an empty file for a root that is a file.
fn make_mount_point(private: &ByteString, root: &ByteString, below: &[u8]) -> Result<(), Failure> {
    let point = ByteString::from(crate::object::join(private.as_bytes(), below));
    let failed = |error: std::io::Error| failure(Step::Mounts, error.raw_os_error().unwrap_or(0), point.display());
    if root.as_path().is_dir() {
        return std::fs::create_dir_all(point.as_path()).map_err(failed);
    }
    if let Some(folder) = point.as_path().parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    std::fs::File::create(point.as_path()).map(drop).map_err(failed)
}
