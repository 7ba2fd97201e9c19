//! One read buffer for all pipes and sockets: what waits costs no memory.
use std::cell::RefCell;
use std::io;

/// A pipe holds no more than this unless somebody enlarges it.
const CHUNK: usize = 64 * 1024;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; CHUNK]);
}

/// What one read gives, in a vector of just that size; empty at end of file.
pub(crate) fn read(read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<Vec<u8>> {
    BUFFER.with_borrow_mut(|buffer| read(buffer).map(|count| buffer[..count].to_vec()))
}
