//! Memory that the helper shares with the processes that it forks: what they are told after the fork is written here, in the form that needs no work.
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::ptr;

/// Room for the command, its environment, the lists of both and the mounts of most commands.
pub(crate) const ROOM: usize = 1024 * 1024;

/// Memory at one address in every process that was forked after it was made. Never unmapped: a helper lives no longer than its one command, and changing
/// a memory map costs more than all the writing.
pub(super) struct Region {
    base: *mut u8,
    used: usize,
    room: usize,
}

impl Region {
    /// A region whose first `head` bytes are kept free for [`Region::write_head`].
    pub(super) fn new(room: usize, head: usize) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice; nothing that exists is touched.
        let base = unsafe { libc::mmap(ptr::null_mut(), room, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            base: base.cast(),
            used: head,
            room,
        })
    }

    /// Where it begins.
    pub(super) fn head(&self) -> *mut u8 {
        self.base
    }

    /// Copies `count` values of `T` into the region; none when there is no room.
    pub(super) fn place<T: Copy>(&mut self, values: *const T, count: usize) -> Option<*mut T> {
        let start = self.used.next_multiple_of(align_of::<T>());
        let end = start.checked_add(count.checked_mul(size_of::<T>())?)?;
        if end > self.room {
            return None;
        }
        self.used = end;
        // SAFETY: `start..end` lies inside the mapping, is aligned for `T`, and was given to nobody before; `values` has `count` values.
        unsafe {
            let target = self.base.add(start).cast::<T>();
            ptr::copy_nonoverlapping(values, target, count);
            Some(target)
        }
    }

    pub(super) fn place_string(&mut self, string: &CStr) -> Option<*const c_char> {
        let bytes = string.to_bytes_with_nul();
        self.place(bytes.as_ptr().cast(), bytes.len()).map(<*mut _>::cast_const)
    }

    /// A null-terminated list of pointers to copies of the strings.
    pub(super) fn place_list(&mut self, strings: &[CString]) -> Option<*const *const c_char> {
        let mut pointers = Vec::with_capacity(strings.len() + 1);
        for string in strings {
            pointers.push(self.place_string(string)?);
        }
        pointers.push(ptr::null());
        self.place(pointers.as_ptr(), pointers.len()).map(<*mut _>::cast_const)
    }
}
