//! Values of other crates that live as long as a communicator.

use std::{any::Any, cell::OnceCell};

/// A list that only grows, so that references into it stay valid. It is short: one entry per crate above.
#[derive(Default)]
pub(super) struct Extensions(OnceCell<Box<Entry>>);

struct Entry {
    value: Box<dyn Any + Send>,
    next: Extensions,
}

impl Extensions {
    pub(super) fn get_or_try_init<T: Send + 'static, E>(
        &self,
        init: impl FnOnce() -> Result<T, E>,
    ) -> Result<&T, E> {
        let mut list = self;
        while let Some(entry) = list.0.get() {
            if let Some(value) = entry.value.downcast_ref() {
                return Ok(value);
            }
            list = &entry.next;
        }
        let value = Box::new(init()?);
        // `init` may have added entries of its own.
        while let Some(entry) = list.0.get() {
            list = &entry.next;
        }
        let entry = list.0.get_or_init(|| Box::new(Entry { value, next: Self::default() }));
        Ok(entry.value.downcast_ref().expect("the entry was just made of this type"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_is_made_once() {
        let list = Extensions::default();
        let made: &u32 = list.get_or_try_init(|| Ok::<_, ()>(7)).unwrap();
        let text: &String = list.get_or_try_init(|| Ok::<_, ()>("seven".to_owned())).unwrap();
        let again: &u32 = list.get_or_try_init(|| Err("not called")).unwrap();
        assert_eq!((made, text.as_str(), again), (&7, "seven", &7));
        assert_eq!(list.get_or_try_init::<u8, _>(|| Err("no")), Err("no"));
    }
}
