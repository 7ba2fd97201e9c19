//! A small assembler of seccomp programs: a balanced decision tree over call numbers with a few tests of arguments at its leaves.
//!
//! `seccompiler` has no action for notifications and no guard against foreign call numbers, so those parts are assembled here; its program for the
//! calls with a constant answer is appended (all of its jumps are relative). One program instead of two is also what costs least to install.
use libc::sock_filter;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JUMP_EQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_GE: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP_SET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;
/// Call numbers from here on are the x32 ones of x86-64, and none at all elsewhere.
const FOREIGN_NUMBERS: u32 = 0x4000_0000;

/// Which calls of one number an action is for. Arguments are registers here, so what is tested is what the kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Every call.
    Always,
    /// Any of these bits is set in the low half of the argument.
    AnyBit(u32, u32),
    /// The low half of the argument is one of these.
    OneOf(u32, &'static [u32]),
    /// The low half of the argument is none of these.
    NoneOf(u32, &'static [u32]),
    /// The low half of the argument is not zero (a process id other than "myself").
    NotZero(u32),
    /// The whole argument is not zero (a pointer).
    NotNull(u32),
    /// The first is not zero and the second not null.
    NotZeroAndNotNull(u32, u32),
}

/// What a matching call gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The supervisor answers.
    Notify,
    /// This error.
    Errno(i32),
}

impl Action {
    fn code(self) -> u32 {
        match self {
            Self::Notify => libc::SECCOMP_RET_USER_NOTIF,
            Self::Errno(errno) => libc::SECCOMP_RET_ERRNO | (errno.cast_unsigned() & libc::SECCOMP_RET_DATA),
        }
    }
}

/// One call number with its tests, tried in order; what matches none of them is permitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    /// Call number.
    pub(crate) number: u32,
    /// Tests in order.
    pub(crate) tests: Vec<(When, Action)>,
}

/// Neighbouring numbers that get the same answer: the kernel numbers related calls in a row, and a shorter program is quicker to install.
#[derive(Debug)]
struct Range {
    first: u32,
    last: u32,
    tests: Vec<(When, Action)>,
}

/// Assembles prologue, tree and `rest`, which gets every call that no leaf is for. `leaves` need not be sorted; numbers are unique.
pub(crate) fn assemble(mut leaves: Vec<Leaf>, rest: &[sock_filter]) -> Vec<sock_filter> {
    leaves.sort_by_key(|leaf| leaf.number);
    let mut ranges: Vec<Range> = Vec::with_capacity(leaves.len());
    for Leaf { number, tests } in leaves {
        match ranges.last_mut() {
            Some(range) if range.last + 1 == number && range.tests == tests => range.last = number,
            _ => ranges.push(Range {
                first: number,
                last: number,
                tests,
            }),
        }
    }
    let mut program = Program {
        code: Vec::with_capacity(ranges.len() * 8 + rest.len() + 8),
        to_rest: Vec::new(),
    };
    program.prologue();
    program.tree(&ranges, 0);
    program.finish(rest)
}

struct Program {
    code: Vec<sock_filter>,
    /// Jumps that lead to the start of `rest`.
    to_rest: Vec<usize>,
}

impl Program {
    fn emit(&mut self, code: u16, k: u32, jt: u8, jf: u8) {
        self.code.push(sock_filter { code, jt, jf, k });
    }

    /// A foreign architecture or number set would carry other calls past the numbers below: such calls do not exist here.
    fn prologue(&mut self) {
        let enosys = Action::Errno(libc::ENOSYS).code();
        self.emit(LOAD, 4, 0, 0);
        self.emit(JUMP_EQ, ARCH, 1, 0);
        self.emit(RETURN, enosys, 0, 0);
        self.emit(LOAD, 0, 0, 0);
        self.emit(JUMP_GE, FOREIGN_NUMBERS, 0, 1);
        self.emit(RETURN, enosys, 0, 0);
    }

    /// Halves the numbers until one range is left; all numbers are known to be `floor` or above. Conditional jumps reach 255 instructions, so the
    /// far half is reached by a long jump.
    fn tree(&mut self, ranges: &[Range], floor: u32) {
        match ranges {
            [] => self.jump_to_rest(),
            [range] => {
                if range.first == range.last {
                    self.emit(JUMP_EQ, range.first, 1, 0);
                } else if range.first <= floor {
                    self.emit(JUMP_GE, range.last + 1, 0, 1);
                } else {
                    self.emit(JUMP_GE, range.first, 0, 1);
                    self.emit(JUMP_GE, range.last + 1, 0, 1);
                }
                self.jump_to_rest();
                self.answer(&range.tests);
            }
            _ => {
                let (low, high) = ranges.split_at(ranges.len() / 2);
                self.emit(JUMP_GE, high[0].first, 0, 1);
                let far = self.code.len();
                self.emit(JUMP, 0, 0, 0);
                self.tree(low, floor);
                self.code[far].k = (self.code.len() - far - 1) as u32;
                self.tree(high, high[0].first);
            }
        }
    }

    fn jump_to_rest(&mut self) {
        self.to_rest.push(self.code.len());
        self.emit(JUMP, 0, 0, 0);
    }

    fn answer(&mut self, tests: &[(When, Action)]) {
        for (when, action) in tests {
            self.test(*when, action.code());
        }
        if tests.last().is_none_or(|(when, _)| *when != When::Always) {
            self.emit(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0);
        }
    }

    /// One test: returns `action` when it matches, falls through otherwise.
    fn test(&mut self, when: When, action: u32) {
        match when {
            When::Always => self.emit(RETURN, action, 0, 0),
            When::AnyBit(argument, bits) => {
                self.emit(LOAD, low_half(argument), 0, 0);
                self.emit(JUMP_SET, bits, 0, 1);
                self.emit(RETURN, action, 0, 0);
            }
            When::OneOf(argument, values) => {
                self.emit(LOAD, low_half(argument), 0, 0);
                for (index, value) in values.iter().enumerate() {
                    self.emit(
                        JUMP_EQ,
                        *value,
                        (values.len() - 1 - index) as u8,
                        u8::from(index + 1 == values.len()),
                    );
                }
                self.emit(RETURN, action, 0, 0);
            }
            When::NoneOf(argument, values) => {
                self.emit(LOAD, low_half(argument), 0, 0);
                for (index, value) in values.iter().enumerate() {
                    self.emit(JUMP_EQ, *value, (values.len() - index) as u8, 0);
                }
                self.emit(RETURN, action, 0, 0);
            }
            When::NotZero(argument) => {
                self.emit(LOAD, low_half(argument), 0, 0);
                self.emit(JUMP_EQ, 0, 1, 0);
                self.emit(RETURN, action, 0, 0);
            }
            When::NotNull(argument) => self.not_null(argument, action, 0),
            When::NotZeroAndNotNull(number, pointer) => {
                self.emit(LOAD, low_half(number), 0, 0);
                self.emit(JUMP_EQ, 0, 5, 0);
                self.not_null(pointer, action, 0);
            }
        }
    }

    /// Five instructions: either half of the argument is set.
    fn not_null(&mut self, argument: u32, action: u32, beyond: u8) {
        self.emit(LOAD, low_half(argument), 0, 0);
        self.emit(JUMP_EQ, 0, 0, 2);
        self.emit(LOAD, low_half(argument) + 4, 0, 0);
        self.emit(JUMP_EQ, 0, 1 + beyond, 0);
        self.emit(RETURN, action, 0, 0);
    }

    fn finish(mut self, rest: &[sock_filter]) -> Vec<sock_filter> {
        let start = self.code.len();
        for jump in self.to_rest {
            self.code[jump].k = (start - jump - 1) as u32;
        }
        self.code.extend_from_slice(rest);
        self.code
    }
}

/// Offset of the low half of an argument in `seccomp_data` on a little-endian machine.
const fn low_half(argument: u32) -> u32 {
    16 + 8 * argument
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    /// A reference interpreter of the subset that is used.
    pub(crate) fn run(program: &[sock_filter], arch: u32, number: u32, args: [u64; 6]) -> u32 {
        let mut data = Vec::new();
        data.extend(number.to_le_bytes());
        data.extend(arch.to_le_bytes());
        data.extend(0u64.to_le_bytes());
        args.iter().for_each(|arg| data.extend(arg.to_le_bytes()));
        let (mut at, mut accumulator) = (0usize, 0u32);
        loop {
            let i = program[at];
            at += 1;
            let branch = |yes: bool| usize::from(if yes { i.jt } else { i.jf });
            match i.code {
                LOAD => accumulator = u32::from_le_bytes(data[i.k as usize..][..4].try_into().unwrap()),
                JUMP => at += i.k as usize,
                JUMP_EQ => at += branch(accumulator == i.k),
                JUMP_GE => at += branch(accumulator >= i.k),
                JUMP_SET => at += branch(accumulator & i.k != 0),
                RETURN => return i.k,
                code => panic!("instruction {code}"),
            }
        }
    }

    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;

    fn rest() -> Vec<sock_filter> {
        vec![sock_filter {
            code: RETURN,
            jt: 0,
            jf: 0,
            k: 77,
        }]
    }

    #[test]
    fn each_number_finds_its_leaf_and_all_others_the_rest() {
        for size in [0u32, 1, 2, 3, 7, 64, 150] {
            let leaves = (0..size)
                .map(|i| Leaf {
                    number: i * 3 + 1,
                    tests: vec![(When::Always, Action::Errno(i.cast_signed() + 1))],
                })
                .collect();
            let program = assemble(leaves, &rest());
            for number in 0..size * 3 + 5 {
                let leaf = number % 3 == 1 && number / 3 < size;
                let expected = if leaf {
                    libc::SECCOMP_RET_ERRNO | (number / 3 + 1)
                } else {
                    77
                };
                assert_eq!(run(&program, ARCH, number, [0; 6]), expected, "{number} of {size}");
            }
        }
    }

    #[test]
    fn neighbours_with_one_answer_share_it_and_their_neighbours_do_not() {
        let listed = [3u32, 4, 5, 9, 10, 20, 30, 31, 32, 33];
        for subset in 0..1u32 << listed.len() {
            let chosen: Vec<u32> = listed
                .iter()
                .enumerate()
                .filter(|(bit, _)| subset >> bit & 1 == 1)
                .map(|(_, number)| *number)
                .collect();
            let leaf = |number: &u32| Leaf {
                number: *number,
                tests: vec![(When::Always, Action::Notify)],
            };
            let program = assemble(chosen.iter().map(leaf).collect(), &rest());
            for number in 0..40 {
                let expected = if chosen.contains(&number) { NOTIFY } else { 77 };
                assert_eq!(run(&program, ARCH, number, [0; 6]), expected, "{number} in {chosen:?}");
            }
        }
    }

    #[test]
    fn foreign_architectures_and_numbers_do_not_exist() {
        let program = assemble(vec![], &rest());
        let enosys = libc::SECCOMP_RET_ERRNO | 38;
        assert_eq!(run(&program, 0x4000_0003, 1, [0; 6]), enosys);
        assert_eq!(run(&program, ARCH, FOREIGN_NUMBERS + 1, [0; 6]), enosys);
        assert_eq!(run(&program, ARCH, FOREIGN_NUMBERS - 1, [0; 6]), 77);
    }

    #[test]
    fn tests_of_arguments_hold_exactly() {
        let cases: &[(When, [u64; 6], bool)] = &[
            (When::AnyBit(1, 0b110), [0, 2, 0, 0, 0, 0], true),
            (When::AnyBit(1, 0b110), [6, 1, 0, 0, 0, 0], false),
            (When::OneOf(2, &[5, 6, 7]), [0, 0, 7, 0, 0, 0], true),
            (When::OneOf(2, &[5, 6, 7]), [0, 0, 5, 0, 0, 0], true),
            (When::OneOf(2, &[5, 6, 7]), [5, 0, 8, 0, 0, 0], false),
            (When::NoneOf(0, &[1, 16]), [16, 0, 0, 0, 0, 0], false),
            (When::NoneOf(0, &[1, 16]), [1, 0, 0, 0, 0, 0], false),
            (When::NoneOf(0, &[1, 16]), [2, 1, 0, 0, 0, 0], true),
            (When::NotZero(3), [0, 0, 0, 1 << 32, 0, 0], false),
            (When::NotZero(3), [0, 0, 0, 9, 0, 0], true),
            (When::NotNull(4), [0, 0, 0, 0, 1 << 40, 0], true),
            (When::NotNull(4), [0, 0, 0, 0, 1, 0], true),
            (When::NotNull(4), [1, 1, 1, 1, 0, 1], false),
            (When::NotZeroAndNotNull(0, 2), [3, 0, 1 << 33, 0, 0, 0], true),
            (When::NotZeroAndNotNull(0, 2), [0, 0, 8, 0, 0, 0], false),
            (When::NotZeroAndNotNull(0, 2), [3, 0, 0, 0, 0, 0], false),
        ];
        for (when, args, matches) in cases {
            let program = assemble(
                vec![Leaf {
                    number: 9,
                    tests: vec![(*when, Action::Notify)],
                }],
                &rest(),
            );
            let expected = if *matches { NOTIFY } else { ALLOW };
            assert_eq!(run(&program, ARCH, 9, *args), expected, "{when:?} {args:?}");
        }
    }
}
