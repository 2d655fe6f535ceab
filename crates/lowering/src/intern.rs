//! Tables in which equal things have one number.

use crate::hash::HashMap;

use std::{borrow::Borrow, hash::Hash, marker::PhantomData, rc::Rc};

/// The number of a thing in a [`Table`] of its kind.
pub(crate) struct Id<T: ?Sized>(u32, PhantomData<fn() -> Box<T>>);

impl<T: ?Sized> Clone for Id<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Id<T> {}

impl<T: ?Sized> PartialEq for Id<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T: ?Sized> Eq for Id<T> {}

impl<T: ?Sized> Hash for Id<T> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl<T: ?Sized> std::fmt::Debug for Id<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Things that are kept once.
pub(crate) struct Table<T: ?Sized + ToOwned> {
    things: Vec<Rc<T>>,
    ids: HashMap<Rc<T>, u32>,
}

impl<T: ?Sized + ToOwned> Default for Table<T> {
    fn default() -> Self {
        Self { things: Vec::new(), ids: HashMap::default() }
    }
}

impl<T: ?Sized + ToOwned + Eq + Hash> Table<T>
where
    Rc<T>: From<T::Owned> + Borrow<T>,
{
    /// The number of a thing, which is copied if it is new.
    pub(crate) fn intern(&mut self, thing: &T) -> Id<T> {
        let id = match self.ids.get(thing) {
            Some(id) => *id,
            None => {
                let (id, kept) = (self.things.len() as u32, Rc::<T>::from(thing.to_owned()));
                self.things.push(Rc::clone(&kept));
                self.ids.insert(kept, id);
                id
            }
        };
        Id(id, PhantomData)
    }

    pub(crate) fn get(&self, id: Id<T>) -> &T {
        &self.things[id.0 as usize]
    }
}
